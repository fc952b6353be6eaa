/* Attention, steered by the reader: choose the word that asks, see scores, weights and the average; choose a row to
 * see which dimensions made its score. data: {tokens, q, k, v, features, values, scale, query, key}; `features` names
 * the dimensions of q and k, `values` those of v. Everything shown is computed here from q, k and v. */
const FIGURE = (kit, root, data) => {
  const { h, s, value, show, fixed, percent, need, number, tr, col } = kit
  const { tokens, q, k, v, scale, features, values } = data
  const names = (xs, name) => need(Array.isArray(xs) && xs.length > 0, `“${name}” must be a list of names`)
  names(tokens, 'tokens'), names(features, 'features'), names(values, 'values')
  for (const [name, width] of [['q', features.length], ['k', features.length], ['v', values.length]]) {
    need(data[name]?.length === tokens.length, `“${name}” must have one row per token`)
    data[name].forEach((row, i) => kit.numbers(row, `${name}[${i}]`, width))
  }
  need(Number.isFinite(scale), '“scale” must be a number')
  const index = i => Number.isInteger(i) && i in tokens
  need(index(data.query), '“query” must be the index of a token')
  need(data.key == null || index(data.key), '“key” must be null or the index of a token')

  let query = data.query, key = data.key ?? null
  const all = tokens.map((_, i) => i), d = features.length, grey = 0
  const times = Math.abs(scale * Math.sqrt(d) - 1) < 1e-6 ? `÷\u00a0√${d}` : `×\u00a0${fixed(scale)}`
  // One range for all queries and keys, so that bars can be compared while the reader moves around.
  const range = xs => [Math.min(0, ...xs), Math.max(0, ...xs)]
  const scoreRange = range(q.flatMap(a => k.map(b => kit.dot(a, b) * scale)))
  const productRange = range(q.flatMap(a => k.flatMap(b => a.map((x, i) => x * b[i]))))
  const [lowest, highest] = range(v.flat())

  // ---- the sentence: a radio button per word ----
  const floor = 104   // height of the arcs over the words
  const arcs = s('svg', { 'aria-hidden': 'true', height: floor })
  const chips = tokens.map((token, i) => {
    const radio = kit.pick('query', () => { query = i; draw() }, token)
    const share = h('span', { class: 'share', 'aria-hidden': 'true' })   // screen readers have the table
    radio.node.append(kit.painted(i))
    return { radio: radio.input, share, node: h('div', { class: 'word' }, radio.node, share) }
  })
  const words = h('div', { class: 'words' }, ...chips.map(c => c.node))
  const reading = h('p', { class: 'reading', 'data-value': 'reading', 'aria-live': 'polite' })

  // Ribbons from the asking word to what it looks at share the width of its port as the weights share 1.
  const drawArcs = weights => {
    const frame = words.getBoundingClientRect(), boxes = chips.map(c => c.node.getBoundingClientRect())
    const oneLine = boxes.every(b => Math.abs(b.top - boxes[0].top) < 4)
    arcs.style.display = oneLine ? '' : 'none'   // over two lines of words, arcs would only confuse
    const centre = boxes.map(b => b.left + b.width / 2 - frame.left), origin = centre[query]
    const port = Math.min(36, boxes[query].width * 0.7), far = Math.max(...centre.map(x => Math.abs(x - origin))) || 1
    // In this order no ribbon crosses another: to the left from near to far, itself, to the right from far to near.
    const side = i => Math.sign(i - query)
    let used = -port / 2
    arcs.replaceChildren(...[...all].sort((a, b) => side(a) - side(b) || b - a).map(i => {
      const width = port * weights[i], from = origin + used + width / 2, to = centre[i]
      used += width
      const height = (floor - port / 2 - 2) * (Math.abs(to - origin) / far) ** 0.6
      const path = i === query ? `V${floor - 20}`   // to itself: a stem
        : `A${Math.abs(to - from) / 2} ${height} 0 0 ${to > from ? 1 : 0} ${to} ${floor}`
      return s('path', { d: `M${from} ${floor}${path}`, fill: 'none', stroke: kit.paints[i % kit.paints.length],
        'stroke-width': Math.max(width, 1), opacity: key === null || key === i ? 0.9 : 0.3 })
    }))
  }

  // ---- scores and weights: a row per word; its button, or a click anywhere on the row, explains the score ----
  const rows = tokens.map((token, i) => {
    const pick = h('button', { type: 'button', class: 'key', 'aria-label': `${token}: explain its score` },
      kit.painted(i), h('span', {}, token))
    const score = value(`score-${i}`), weight = value(`weight-${i}`)
    const scoreBar = kit.bar(...scoreRange, grey), weightBar = kit.bar(0, 1, i)
    const node = tr(pick, scoreBar.cell, number(score), weightBar.cell, number(weight))
    node.addEventListener('click', () => { key = key === i ? null : i; draw() })
    return { node, pick, score, weight, scoreBar, weightBar }
  })
  const entropy = value('entropy'), choices = value('choices')

  // ---- the average: for each dimension of the values, what each word put in ----
  const averages = values.map((name, j) => {
    const bar = kit.bar(lowest, highest, ...all), output = value(`output-${j}`)
    const labels = tokens.map(token => h('span', {}, token))
    bar.cell.append(h('div', { class: 'labels', 'aria-hidden': 'true' }, ...labels))
    return { bar, output, labels, node: tr(name, bar.cell, number(output)) }
  })
  const drawAverage = ({ bar, output, labels }, j, weights) => {
    const span = highest - lowest || 1, width = bar.cell.firstChild.clientWidth
    let plus = 0, minus = 0   // positive parts stack to the right of zero, negative ones to the left
    all.forEach(i => {
      const part = weights[i] * v[i][j], from = part < 0 ? minus : plus
      if (part < 0) minus += part
      else plus += part
      bar.set(from + part, from, bar.pieces[i])
      bar.pieces[i].classList.toggle('chosen', i === key && part !== 0)
      // A label under each piece that is wide enough to carry it.
      labels[i].style.left = `${100 * (from + part / 2 - lowest) / span}%`
      labels[i].style.visibility = Math.abs(part) / span * width > labels[i].offsetWidth ? '' : 'hidden'
    })
    show(output, plus + minus)
  }

  // ---- one score explained ----
  const products = features.map((name, i) => {
    const a = value(`query-${i}`), b = value(`key-${i}`), product = value(`product-${i}`)
    const bar = kit.bar(...productRange, grey)
    return { a, b, product, bar, node: tr(name, number(a), number('× ', b), number('= ', product), bar.cell) }
  })
  const why = h('p', { 'aria-live': 'polite' }), dot = value('dot'), chosen = value('chosen-score')
  const contributions = values.map((_, j) => value(`contribution-${j}`)), hands = h('span')
  const details = h('div', {},
    kit.table([h('td'), col('query'), col('key'), col('product'), h('td')],
      products.map(p => p.node)),
    h('p', {}, 'Sum ', dot, `, then ${times}: score `, chosen, '.'),
    h('p', {}, hands, ...contributions.flatMap((c, j) => [`${j ? ', ' : ''}${values[j]} `, c]), '.'))

  const drawWhy = (scores, weights) => {
    details.hidden = key === null
    why.classList.toggle('head', key !== null)
    if (key === null) return why.replaceChildren('Choose a row to see where its score comes from.')
    products.forEach((p, i) => {
      const product = q[query][i] * k[key][i]
      show(p.a, q[query][i]), show(p.b, k[key][i]), show(p.product, product), p.bar.set(product)
    })
    show(dot, kit.dot(q[query], k[key])), show(chosen, scores[key])
    contributions.forEach((c, j) => show(c, weights[key] * v[key][j]))
    why.replaceChildren(`Why ${tokens[query]} gives ${tokens[key]} the score ${fixed(scores[key])}`)
    hands.replaceChildren(h('strong', {}, tokens[key]), ` hands on ${percent(weights[key])} of its value: `)
  }

  const drawReading = weights => {
    reading.replaceChildren(h('strong', {}, tokens[query]), ' looks at ', ...kit.looks(weights, tokens, query), '.')
  }

  const draw = () => {
    const scores = k.map(b => kit.dot(q[query], b) * scale), weights = kit.softmax(scores), H = kit.entropy(weights)
    chips.forEach((c, i) => { c.radio.checked = i === query; c.share.textContent = percent(weights[i]) })
    rows.forEach((row, i) => {
      show(row.score, scores[i]), row.scoreBar.set(scores[i])
      show(row.weight, weights[i], x => percent(x)), row.weightBar.set(weights[i])
      row.pick.setAttribute('aria-pressed', i === key)
      row.node.classList.toggle('chosen', i === key)
    })
    averages.forEach((row, j) => drawAverage(row, j, weights))
    show(entropy, H), show(choices, Math.exp(H), x => fixed(x, 1))
    drawReading(weights)
    drawWhy(scores, weights)
    drawArcs(weights)
  }

  const ruler = h('div')   // as wide as the figure; no drawing changes its size, so that observing it cannot loop
  root.append(ruler,
    h('style', {}, `
      .sentence { max-width: ${120 * tokens.length}px; margin: 8px auto 0 }
      .words { display: flex; flex-wrap: wrap; justify-content: space-evenly; gap: 6px 2px }
      .word { text-align: center }
      .word label { min-width: 40px; font-size: 1.2em }
      .word label span { padding: 4px 10px 11px }
      .word i { position: absolute; left: 9px; right: 9px; bottom: 7px; height: 5px; border-radius: 2px }
      .share { font-size: .92em; font-variant-numeric: tabular-nums }
      .reading { margin: 12px 0 20px; text-align: center; font-size: 1.15em; min-height: 2.8em }
      .panels { display: grid; gap: 20px clamp(20px, 5cqi, 40px) }
      .panels > div { min-width: 0 }
      .key { display: flex; align-items: center; gap: 8px; width: 100%; padding: 0 8px 0 6px; border-color: #0000;
        text-align: start; white-space: nowrap }
      .key span { max-width: 5.5em; overflow: hidden; text-overflow: ellipsis }
      .key i { flex: none; width: 10px; height: 10px; border-radius: 2px }
      .scores tbody tr { cursor: pointer } tbody th { width: 1% } tbody tr.chosen { background: #7f879026 }
      .averages .bar { height: 20px; margin-top: 6px } .averages tbody :is(th, .number) { padding-top: 6px; vertical-align: top }
      .labels { position: relative; height: 1.5em; font-size: .85em }
      .labels span { position: absolute; padding: 0 2px; transform: translateX(-50%); white-space: nowrap }
      .bar i.chosen { outline: 2px solid currentColor; z-index: 1 }
      .why { margin-top: 16px } .why p, .note { margin-top: 6px }
      @container (min-width: 620px) { .panels { grid-template-columns: 1fr 1fr } .reading { min-height: 0 } }
      @container (max-width: 480px) { .reading { min-height: 4.2em } .word label { font-size: 1em } .word label span { padding-inline: 4px }
        .word i { left: 5px; right: 5px } .key { padding: 0 2px; gap: 5px } }`),
    h('fieldset', {}, h('legend', { class: 'head' }, 'Pick a word, see where it looks'),
      h('div', { class: 'sentence' }, arcs, words)),
    reading,
    h('div', { class: 'panels' },
      h('div', { class: 'scores' },
        kit.table([h('th', { scope: 'col' }, 'word'), col('score', `query · key ${times}`), col('weight', 'softmax of scores')],
          rows.map(r => r.node)),
        h('p', { class: 'note' }, 'Entropy ', entropy, ` of at most ${fixed(Math.log(tokens.length))} nats: like an even `,
          'choice among ', choices, ' words.')),
      h('div', {},
        h('div', { class: 'averages' }, kit.table([col('output', 'average of the values, by weight'), h('td')],
          averages.map(a => a.node))),
        h('div', { class: 'why' }, why, details))))
  draw()
  new ResizeObserver(draw).observe(ruler)
}
