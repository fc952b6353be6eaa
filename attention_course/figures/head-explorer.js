/* Many heads read one text: choose a head and the token that asks, see where that head looks, and what the others do.
 * data: {texts: [{tokens, heads, name}], names, text, head, query, causal}; heads[h] is the n × n map of weights of head
 * h, names[h] its name; a text's `name` is optional. With `causal`, tokens after the asking one are shown as hidden. */
const FIGURE = (kit, root, data) => {
  const { h, value, show, need, percent } = kit
  const { texts, names, causal = false } = data
  need(Array.isArray(names) && names.length > 0, '“names” must be a list of the heads’ names')
  need(Array.isArray(texts) && texts.length > 0, '“texts” must be a list of texts')
  texts.forEach(({ tokens, heads }, t) => {
    need(Array.isArray(tokens) && tokens.length > 0, `texts[${t}] needs “tokens”`)
    need(heads?.length === names.length, `texts[${t}] needs one map per name in “names”`)
    heads.forEach((map, head) => {
      const where = `texts[${t}].heads[${head}]`
      need(map?.length === tokens.length, `${where} must have one row per token`)
      map.forEach((row, i) => {
        kit.numbers(row, `${where}[${i}]`, tokens.length)
        const total = kit.sum(row)
        need(row.every(w => w >= 0) && (total === 0 || Math.abs(total - 1) < 0.02), `${where}[${i}] must hold weights that sum to 1`)
        need(!causal || row.every((w, j) => j <= i || w === 0), `${where}[${i}] looks ahead, but “causal” is true`)
      })
    })
  })
  const index = (i, xs, name) => need(Number.isInteger(i) && i in xs, `“${name}” is no index of what there is`)
  let { text = 0, head = 0, query } = data
  index(text, texts, 'text'), index(head, names, 'head'), index(query, texts[text].tokens, 'query')

  // How far a head looks, in tokens, averaged over all that ask.
  const distance = map => kit.sum(map.map((row, i) => kit.sum(row.map((w, j) => w * Math.abs(i - j))))) / map.length

  // ---- the texts ----
  const label = ({ name, tokens }) => name ?? tokens.slice(0, 4).join(' ') + (tokens.length > 4 ? ' …' : '')
  const textPicks = texts.map((t, i) => kit.pick('text', () => {
    text = i
    query = Math.min(query, t.tokens.length - 1)
    layWords(), drawMaps(), draw()
  }, label(t)))

  // ---- the heads: a small map each ----
  const size = 96
  const heads = names.map((name, i) => {
    const canvas = h('canvas', { width: 2 * size, height: 2 * size, 'aria-hidden': 'true' })
    const line = h('i'), far = value(`distance-${i}`)
    const pick = kit.pick('head', () => { head = i; draw() }, h('span', { class: 'thumb' }, canvas, line),
      h('span', { class: 'name' }, name), h('small', {}, h('span', { 'aria-hidden': 'true' }, '↔\u00a0'), far,
      h('span', { class: 'spoken' }, ' tokens away')))
    return { ...pick, canvas, line, far }
  })
  const drawMaps = () => heads.forEach(({ canvas, far }, i) => {
    const map = texts[text].heads[i], step = 2 * size / map.length, brush = canvas.getContext('2d')
    brush.clearRect(0, 0, 2 * size, 2 * size)
    brush.fillStyle = kit.paints[1]
    map.forEach((row, a) => row.forEach((w, b) => {
      brush.globalAlpha = Math.min(1, Math.sqrt(w))   // the root, so that the eye finds what is small too
      brush.fillRect(b * step, a * step, step, step)
    }))
    show(far, distance(map), x => kit.fixed(x, 1))
  })

  // ---- the text: a radio button per token ----
  let words = []
  const flow = h('div', { class: 'flow' })
  const layWords = () => {
    words = texts[text].tokens.map((token, i) => {
      const share = value(`weight-${i}`), word = h('b', {}, token)
      const pick = kit.pick('query', () => { query = i; draw() }, word, h('span', { class: 'bar' }, kit.painted(1)))
      return { ...pick, word, share, bar: pick.node.querySelector('i'), whole: h('div', {}, pick.node, share) }
    })
    flow.replaceChildren(...words.map(w => w.whole))
  }
  const reading = h('p', { class: 'reading', 'data-value': 'reading', 'aria-live': 'polite' })
  const entropy = value('entropy'), choices = value('choices'), top = value('top'), most = h('span')

  const draw = () => {
    const { tokens, heads: maps } = texts[text], weights = maps[head][query], n = tokens.length
    const seen = tokens.map((_, i) => i).filter(i => !causal || i <= query), H = kit.entropy(weights)
    textPicks.forEach((p, i) => { p.input.checked = i === text })
    heads.forEach(({ input, line }, i) => {
      input.checked = i === head
      line.style.top = `${100 * query / n}%`
      line.style.height = `${100 / n}%`
    })
    words.forEach(({ input, word, share, bar, whole }, i) => {
      input.checked = i === query
      whole.className = seen.includes(i) ? 'word' : 'word later'
      word.style.background = `rgb(58 134 214 / ${0.55 * Math.sqrt(weights[i])})`
      bar.style.width = `${100 * weights[i]}%`
      show(share, weights[i], x => seen.includes(i) ? percent(x) : '–')
    })
    reading.replaceChildren(`${names[head]}: `, h('strong', {}, tokens[query]), ...(kit.sum(weights) === 0 ? [' sees nothing.']
      : [' looks at ', ...kit.looks(seen.map(i => weights[i]), seen.map(i => tokens[i]), seen.indexOf(query),
        'all it sees alike'), '.']))
    show(top, Math.max(...weights), x => percent(x))
    show(entropy, H), show(choices, Math.exp(H), x => kit.fixed(x, 1))
    most.textContent = kit.fixed(Math.log(seen.length))
  }

  const half = names.length > 4 ? Math.ceil(names.length / 2) : names.length
  root.append(
    h('style', {}, `
      fieldset + fieldset, .reading { margin-top: 14px } legend { margin-bottom: 4px }
      .texts { display: flex; flex-wrap: wrap; gap: 6px } .texts .pick > span { padding: 6px 12px; border-color: #7f8790 }
      .heads { display: grid; grid-template-columns: repeat(${Math.min(4, half)}, minmax(0, 112px)); gap: 4px }
      .heads .pick > span { padding: 4px; line-height: 1.25 } .heads .name { display: block; overflow-wrap: anywhere }
      .thumb { position: relative; display: block; margin-bottom: 3px; border: 1px solid #7f8790 }
      canvas { display: block; width: 100%; aspect-ratio: 1; forced-color-adjust: none; print-color-adjust: exact }
      .thumb i { position: absolute; left: -3px; right: -3px; box-sizing: content-box; margin-top: -1px; border: 1px solid currentColor }
      .flow { display: flex; flex-wrap: wrap; gap: 6px 2px } .word { text-align: center }
      .word .pick { min-width: 40px; font-size: 1.1em } .word .pick > span { padding: 3px }
      .word b { display: block; padding: 2px 5px; border-radius: 4px; font-weight: 400; white-space: pre-wrap;
        forced-color-adjust: none; print-color-adjust: exact }
      .word .bar { height: 5px; margin-top: 3px; min-width: 0 } .word i { left: 0 } .word output { display: block; font-size: .85em; line-height: 1.2; font-variant-numeric: tabular-nums }
      .later b { text-decoration: underline dotted #7f8790 } .later .bar { visibility: hidden }
      .reading { font-size: 1.15em; min-height: 2.8em } .note { margin-top: 6px }
      @container (min-width: 560px) { .heads { grid-template-columns: repeat(${Math.min(8, names.length)}, minmax(0, 112px)) } .reading { min-height: 0 } }`),
    ...(texts.length > 1 ? [h('fieldset', {}, h('legend', { class: 'head' }, 'The text'),
      h('div', { class: 'texts' }, ...textPicks.map(p => p.node)))] : []),
    h('fieldset', {}, h('legend', { class: 'head' }, 'Pick a head',
      h('small', {}, 'Row: the token that asks. Column: the token it looks at. ↔: how far that is on average, in tokens.')),
      h('div', { class: 'heads' }, ...heads.map(p => p.node))),
    h('fieldset', {}, h('legend', { class: 'head' }, 'Pick the token that asks',
      ...(causal ? [h('small', {}, 'Dotted tokens come later: they are hidden from it.')] : [])), flow),
    reading,
    h('p', { class: 'note' }, 'Highest weight ', top, ', entropy ', entropy, ' of at most ', most,
      ' nats: like an even choice among ', choices, ' tokens.'))
  layWords(), drawMaps(), draw()
}
