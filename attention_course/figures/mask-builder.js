/* A mask, put together from three parts; what it hides, and the weights that are left. data: {tokens, scores, real,
 * causal, window, query}; `scores` is n × n, tokens from `real` on are padding, `window` counts positions, 0 is none.
 * A window is causal if the mask is: the last positions, the query's own included; else it reaches to both sides. */
const FIGURE = (kit, root, data) => {
  const { h, value, show, need, number, percent } = kit
  const { tokens, scores } = data, n = tokens?.length
  need(Array.isArray(tokens) && n > 0, '“tokens” must be a list of names')
  need(n <= 8, `${n} tokens are more than the eight that fit on a phone`)
  need(Array.isArray(scores) && scores.length === n, '“scores” must have one row per token')
  scores.forEach((row, i) => kit.numbers(row, `scores[${i}]`, n))
  let { real, causal = false, window, query } = data
  window ??= 0
  const within = (x, low, high, name) =>
    need(Number.isInteger(x) && low <= x && x <= high, `“${name}” must be a whole number from ${low} to ${high}`)
  within(real, 0, n, 'real'), within(window, 0, n, 'window'), within(query, 0, n - 1, 'query')
  need(typeof causal === 'boolean', '“causal” must be true or false')

  const all = tokens.map((_, i) => i)
  // Three parts, three hatchings: each in its own direction, so that they can be told apart where they overlap.
  const parts = {
    padding: { hides: (i, j) => j >= real, paint: 3, angle: 0 },
    causal: { hides: (i, j) => causal && j > i, paint: 4, angle: 45 },
    window: { hides: (i, j) => window > 0 && (causal ? i - j : Math.abs(i - j)) >= window, paint: 2, angle: 135 },
  }
  const hatching = (names, faint = '') => names.map(name => {
    const { angle, paint } = parts[name]
    return `repeating-linear-gradient(${angle}deg, ${kit.paints[paint]}${faint} 0 1.5px, #0000 1.5px 7px)`
  }).join(', ')
  const swatch = (...names) =>
    h('span', { class: 'swatch', 'aria-hidden': 'true', style: `background-image: ${hatching(names)}` })
  const hiders = (i, j) => Object.keys(parts).filter(name => parts[name].hides(i, j))
  const name = i => i < real ? tokens[i] : 'pad'

  // ---- the map: a row per query, chosen by its radio button or a click anywhere on it ----
  const keyHeads = all.map(() => h('span'))
  const rows = all.map(i => {
    const label = h('span'), blank = h('small', {}, 'sees none')
    const radio = kit.pick('query', () => { query = i; draw() }, label, blank)
    const cells = all.map(j => {
      const output = value(`weight-${i}-${j}`)
      return { output, node: h('td', {}, output) }
    })
    const node = kit.tr(radio.node, ...cells.map(c => c.node))
    node.addEventListener('click', event => { if (event.target.closest('td')) radio.input.click() })
    return { label, blank, radio, cells, node }
  })
  const drawCell = ({ output, node }, weight, hidden, nothing) => {
    node.style.backgroundImage = hatching(hidden, nothing ? '66' : '')   // paler, for a number stands on it
    node.style.backgroundColor = hidden.length ? '' : `rgb(58 134 214 / ${0.07 + 0.48 * weight})`
    output.setAttribute('data-exact', weight)
    const by = h('span', { class: 'spoken' }, hidden.length ? ` hidden by ${hidden.join(' and ')}` : '\u00a0%')
    output.replaceChildren(nothing ? '0' : hidden.length ? '' : percent(weight).slice(0, -2), by)
  }
  const visible = value('visible'), share = value('share'), blanks = h('p', { class: 'note' })

  // ---- the chosen row ----
  const asks = h('span'), sees = value('row-visible')
  const keys = all.map(j => {
    const key = h('span'), score = value(`score-${j}`), weight = value(`row-weight-${j}`), bar = kit.bar(0, 1, 1)
    const why = h('span', { class: 'why' })
    bar.cell.append(why)
    return { key, score, weight, bar, why, node: kit.tr(key, number(score), bar.cell, number(weight)) }
  })
  const reading = h('p', { class: 'reading', 'data-value': 'reading', 'aria-live': 'polite' })
  const code = h('code', { 'data-value': 'code' })
  const call = () => [real < n && `padding_mask([${real}], ${n})`,
    causal && (window ? `causal_mask(${n}, window=${window})` : `causal_mask(${n})`),
    !causal && window && `window_mask(${n}, window=${window})`].filter(Boolean).join(' & ') || 'None'

  const draw = () => {
    const hidden = all.map(i => all.map(j => hiders(i, j)))
    const weights = all.map(i => {
      const seen = all.filter(j => !hidden[i][j].length), row = all.map(() => 0)
      const softened = seen.length ? kit.softmax(seen.map(j => scores[i][j])) : []   // a row that sees nothing: zeros
      seen.forEach((j, k) => { row[j] = softened[k] })
      return row
    })
    const seen = all.map(i => all.filter(j => !hidden[i][j].length))
    const count = kit.sum(seen.map(s => s.length)), empty = seen.filter(s => !s.length).length

    all.forEach(i => {
      keyHeads[i].textContent = rows[i].label.textContent = name(i)
      rows[i].radio.input.checked = i === query
      rows[i].blank.hidden = seen[i].length > 0
      rows[i].node.classList.toggle('chosen', i === query)
      all.forEach(j => drawCell(rows[i].cells[j], weights[i][j], hidden[i][j], !seen[i].length))
    })
    show(visible, count, x => kit.fixed(x, 0)), show(share, count / n ** 2, x => percent(x))
    blanks.textContent = !empty ? '' : `${empty === 1 ? 'One row sees' : `${empty} rows see`} nothing: `
      + `${empty === 1 ? 'its' : 'their'} weights are all 0, and so is what attention returns.`

    asks.textContent = name(query)
    show(sees, seen[query].length, x => kit.fixed(x, 0))
    keys.forEach((row, j) => {
      const by = hidden[query][j]
      row.key.textContent = name(j)
      show(row.score, scores[query][j]), show(row.weight, weights[query][j], x => percent(x)), row.bar.set(weights[query][j])
      row.bar.cell.firstChild.hidden = by.length > 0
      row.why.replaceChildren(...(by.length ? ['hidden by ', by.join(', ')] : []))
    })
    const strong = h('strong', {}, name(query)), mine = seen[query]
    const total = h('span', { class: 'spoken' }, ` In all, ${count} of ${n ** 2} pairs are visible.`)
    reading.replaceChildren(strong, ...(!mine.length ? [' sees nothing: its weights are all 0.']
      : [` sees ${mine.length} of ${n} and looks at `,
        ...kit.looks(mine.map(j => weights[query][j]), mine.map(name), mine.indexOf(query), 'all of them alike'), '.']), total)

    code.textContent = call()
    realSlider.set(real, `${real} of ${n} tokens are real`)
    windowSlider.set(window, window ? `a window of ${window}` : 'no window')
    reach.textContent = causal ? 'looking back' : 'to both sides'
    causalBox.checked = causal
  }

  const reach = h('span')
  const realSlider = kit.slider({ name: 'real', label: [swatch('padding'), 'Padding, real tokens'],
    choices: [...all, n], format: kit.tick, onchange: x => { real = x; draw() } })
  const windowSlider = kit.slider({ name: 'window', label: [swatch('window'), 'Window, ', reach],
    choices: [...all.map(i => i + 1), 0], format: x => x ? kit.tick(x) : 'off', onchange: x => { window = x; draw() } })
  const causalBox = h('input', { type: 'checkbox', id: 'causal', onchange: () => { causal = causalBox.checked; draw() } })

  root.append(
    h('style', {}, `
      .controls { display: grid; gap: 4px 32px }
      .swatch { display: inline-block; width: 22px; height: 15px; margin-right: 8px; border: 1px solid #7f8790;
        vertical-align: -2px; forced-color-adjust: none; print-color-adjust: exact }
      .check { display: flex; align-items: center; min-height: 40px; cursor: pointer }
      .check input { width: 22px; height: 22px; margin: 0 10px 0 0; accent-color: #3a86d6 }
      .panels { display: grid; gap: 20px 36px; margin-top: 14px } .panels > div, fieldset { min-width: 0 }
      .map { table-layout: fixed; max-width: 440px; border-collapse: separate; border-spacing: 2px; margin-left: -2px }
      .map tr { border: 0 } .map thead th { height: auto; padding: 0 0 4px; text-align: center; font-weight: 400 }
      .map thead th span { writing-mode: vertical-rl; transform: rotate(180deg) }
      .map thead td { width: 72px; border: 0; vertical-align: bottom; text-align: start; line-height: 1.2 }
      .map th { padding: 0 } .map .pick > span { padding: 1px 4px; line-height: 1.15; min-height: 36px; align-content: center }
      .map small { font-size: .75em; white-space: nowrap }
      .map td { height: 38px; padding: 0; text-align: center; font-size: .9em; border: 1px solid #7f879055; background-clip: padding-box; cursor: pointer;
        forced-color-adjust: none; print-color-adjust: exact }
      .map .chosen { outline: 2px solid currentColor; border-radius: 6px }
      .why { font-size: .85em; line-height: 1.1 } .why:not(:empty) { display: block }
      .asks { margin-bottom: 4px } .note { margin-top: 6px } .row th:first-child { width: 1% }
      .reading { margin: 14px 0; font-size: 1.1em; text-align: center; min-height: 2.8em }
      code { overflow-wrap: anywhere; font-size: .95em }
      @container (max-width: 310px) { .map td { font-size: .8em } }
      @container (min-width: 620px) { .controls { grid-template-columns: 1fr auto 1fr; align-items: center }
        .panels { grid-template-columns: 1fr 1fr } .reading { min-height: 0 } }`),
    h('div', { class: 'controls' }, realSlider.node,
      h('label', { class: 'check head' }, causalBox, swatch('causal'), 'Causal'), windowSlider.node),
    reading,
    h('div', { class: 'panels' },
      h('fieldset', {}, h('legend', { class: 'head' }, 'Weights in %: pick a row'),
        h('table', { class: 'map' },
          h('thead', {}, h('tr', {}, h('td', {}, h('small', {}, 'key →'), h('small', {}, 'query ↓')),
            ...keyHeads.map(k => h('th', { scope: 'col' }, k)))),
          h('tbody', {}, ...rows.map(r => r.node))),
        h('p', { class: 'note' }, visible, ` of ${n ** 2} pairs are visible, `, share, '.'), blanks),
      h('div', { class: 'row-view' },
        h('p', { class: 'asks head' }, 'The row of ', asks, ': ', sees, ` of ${n} keys visible`),
        kit.table([h('th', { scope: 'col' }, 'key'), kit.col('score'), kit.col('weight', 'softmax of the visible scores')],
          keys.map(k => k.node)),
        h('p', { class: 'note' }, 'In the library: ', code))))
  draw()
}
