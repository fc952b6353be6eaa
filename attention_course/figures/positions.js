/* Positions as clocks: a pair of columns is a hand that turns as the position grows. data: {d, position, offset,
 * max_position, max_offset}, d even and at most 16. With `q` and `k`, d numbers each, the reader may choose rotary
 * positions for these two instead of sinusoidal rows; `kind` ("sinusoidal", "rotary") says what comes first,
 * `interleaved` which columns are pairs, `base` how slow the last pair is, and `bases` which bases there are to choose. */
const FIGURE = (kit, root, data) => {
  const { h, s, value, show, need, paints } = kit
  const { d, max_position: far, max_offset: reach, q, k, bases = [data.base ?? 10000], interleaved = false } = data
  let { position, offset, kind = 'sinusoidal', base = bases.includes(10000) ? 10000 : bases[0] } = data
  const within = (x, low, high, name) =>
    need(Number.isInteger(x) && low <= x && x <= high, `“${name}” must be a whole number from ${low} to ${high}`)
  within(d, 2, 16, 'd'), need(d % 2 === 0, '“d” must be even')
  within(far, 1, 1000, 'max_position'), within(reach, 1, Math.min(far, 200), 'max_offset')
  within(position, 0, far, 'position'), within(offset, Math.max(-reach, -position), reach, 'offset')
  if (q || k) kit.numbers(q, 'q', d), kit.numbers(k, 'k', d)
  kit.numbers(bases, 'bases')
  need(bases.every((b, i) => b > (bases[i - 1] ?? 0)), '“bases” must be above 0 and rise')
  need(bases.includes(base), '“base” must be one of the bases')
  need(kind === 'sinusoidal' || kind === 'rotary' && q, '“kind” must be "sinusoidal", or "rotary" with “q” and “k”')

  const pairs = Array.from({ length: d / 2 }, (_, i) => i), rotary = () => kind === 'rotary'
  const frequency = (i, b = base) => (rotary() ? b : 10000) ** (-2 * i / d)
  const columns = i => interleaved || !rotary() ? [2 * i, 2 * i + 1] : [i, i + d / 2]
  // The hand of pair i at a position, as [up, right]; it turns clockwise. At position 0 a sinusoidal row has its sines
  // at 0 and its cosines at 1: up. A rotary pair starts where the vector points.
  const turned = ([up, right], angle) =>
    [up * Math.cos(angle) - right * Math.sin(angle), up * Math.sin(angle) + right * Math.cos(angle)]
  const start = (x, i) => rotary() ? columns(i).map(c => x[c]) : [1, 0]
  const hand = (x, i, at, b) => turned(start(x, i), at * frequency(i, b))
  const products = (p, j, b) => pairs.map(i => kit.dot(hand(q, i, p, b), hand(k, i, j, b)))
  const degrees = ([up, right]) => Math.atan2(right, up) * 180 / Math.PI
  const signed = angle => 180 - ((180 - angle) % 360 + 360) % 360   // above -180, at most 180

  // ---- the curve over offsets, at its real size; screen readers have the sentence ----
  const offsets = Array.from({ length: 2 * reach + 1 }, (_, n) => n - reach)
  let curve, low, high
  const measure = () => {   // one axis for all bases, so that their curves can be compared
    const curves = bases.map(b => offsets.map(o => kit.sum(products(0, o, b)))), all = [0, ...curves.flat()]
    curve = curves[bases.indexOf(base)]
    const marks = kit.ticks(Math.min(...all), Math.max(...all) || 1, 6), step = marks[1] - marks[0]
    low = Math.floor(Math.min(...all) / step) * step, high = Math.ceil((Math.max(...all) || 1) / step) * step
  }
  const plot = s('svg', { 'aria-hidden': 'true', height: 214, class: 'plot' })
  const box = () => ({ left: 34, right: (plot.clientWidth || 600) - 12, top: 10, bottom: 172 })
  const drawPlot = () => {
    const { left, right, top, bottom } = box()
    const x = o => left + (right - left) * (o + reach) / (2 * reach), y = v => bottom - (bottom - top) * (v - low) / (high - low)
    const line = (name, ...points) => s('polyline', { points: points.join(' '), class: name })
    const text = (content, x, y, anchor) => s('text', { x, y, 'text-anchor': anchor }, content)
    plot.replaceChildren(
      ...kit.ticks(low, high, 6).flatMap(t => [line(t ? 'grid' : 'axis', left, y(t), right, y(t)), text(kit.tick(t), left - 7, y(t) + 4, 'end')]),
      line('axis', left, bottom, right, bottom),
      ...kit.ticks(-reach, reach, right / 90).filter(Number.isInteger).flatMap(t =>
        [line('axis', x(t), bottom, x(t), bottom + 5), text(kit.tick(t), x(t), bottom + 19, 'middle')]),
      text('offset k', right, bottom + 38, 'end'),
      line('guide', x(offset), top, x(offset), bottom),
      line('curve', ...offsets.map((o, n) => `${x(o)},${y(curve[n])}`)),
      s('circle', { cx: x(offset), cy: y(kit.sum(products(position, position + offset))), r: 6, class: 'mark' }))
  }
  const point = event => {   // a finger that goes up or down still moves the page
    const { left, right } = box(), part = (event.clientX - plot.getBoundingClientRect().left - left) / (right - left)
    setOffset(Math.max(-reach, Math.min(reach, Math.round((2 * part - 1) * reach))))
  }
  plot.addEventListener('pointerdown', point)
  plot.addEventListener('pointermove', event => { if (event.buttons) point(event) })

  // ---- a clock per pair, and three numbers ----
  const clocks = pairs.map(i => {
    const shown = ['period', 'between', 'product'].map(name => value(`${name}-${i}`)), names = h('span')
    const wedge = s('path', { class: 'wedge' }), hands = ['other', 'mine'].map(name => s('path', { class: `hand ${name}` }))
    const ends = [s('circle', { r: 5.5, class: 'end other' }), s('circle', { r: 3.5, class: 'end mine' })]
    const spoken = words => h('span', { class: 'spoken' }, words)
    const node = h('li', {}, h('small', {}, spoken('columns '), names),
      s('svg', { viewBox: '-50 -50 100 100', 'aria-hidden': 'true' }, s('circle', { r: 47, class: 'axis' }),
        s('path', { d: 'M0 -47v7', class: 'axis' }), wedge, ...hands, ...ends),
      h('span', {}, spoken('one turn in '), shown[0], spoken(' positions, ')),
      h('span', {}, shown[1], '°', spoken(' apart, ')), h('strong', {}, spoken('product '), shown[2]))
    return { shown, names, wedge, hands, ends, node }
  })
  const sentence = h('p', { class: 'reading', 'data-value': 'reading', 'aria-live': 'polite' }), total = value('dot')
  const legend = [h('span'), h('span')]

  const draw = () => {
    const j = position + offset, parts = products(position, j), sum = kit.sum(parts)
    const longest = Math.max(...pairs.flatMap(i => [q, k].map(x => Math.hypot(...start(x, i))))) || 1
    pairs.forEach(i => {
      const { shown, names, wedge, hands, ends } = clocks[i], tips = [hand(k, i, j), hand(q, i, position)]
      const between = signed(degrees(start(k, i)) - degrees(start(q, i)) + offset * frequency(i) * 180 / Math.PI)
      const places = tips.map(([up, right]) => [right, -up].map(x => x * 40 / longest))
      places.forEach(([x, y], n) => {
        hands[n].setAttribute('d', `M0 0L${x} ${y}`)
        ends[n].setAttribute('transform', `translate(${x} ${y})`)
      })
      const [to, from] = tips.map(([up, right]) => [right, -up].map(x => x * 22 / (Math.hypot(up, right) || 1)))
      wedge.setAttribute('d', `M0 0L${from}A22 22 0 0 ${between < 0 ? 0 : 1} ${to}Z`)
      names.textContent = columns(i).join(', ')
      show(shown[0], 2 * Math.PI / frequency(i), x => kit.fixed(x, x < 100 ? 1 : 0))
      show(shown[1], between, x => kit.fixed(x, 0)), show(shown[2], parts[i])
    })
    show(total, sum)
    const apart = Math.abs(offset)
    sentence.replaceChildren(rotary() ? `Query at ${position}, key at ${j}` : `Positions ${position} and ${j}`, ': the products sum to ',
      h('strong', {}, kit.fixed(sum)), !apart ? ', as at every position.'
        : rotary() ? `, as for any key ${apart} ${offset > 0 ? 'after' : 'before'} its query.` : `, as for any two positions ${apart} apart.`)
    legend.forEach((node, n) => {
      node.textContent = `${rotary() ? ['query', 'key'][n] : 'row'} at ${n ? 'p + k' : 'p'} = ${n ? j : position}`
    })
    positionSlider.set(position, `p = ${position}, k = ${kit.tick(offset)}`)
    offsetSlider.set(offset, `k = ${kit.tick(offset)}, dot product ${kit.fixed(sum)}`)
    baseSlider.set(base, `base ${base}`)
    baseSlider.node.hidden = !rotary() || bases.length < 2
    picks.forEach(p => { p.input.checked = p.name === kind })
    drawPlot()
  }
  const setOffset = x => { offset = x, position = Math.max(position, -x), draw() }   // no position is below 0
  const positionSlider = kit.slider({ name: 'position', label: 'Position p', format: kit.tick,
    choices: Array.from({ length: far + 1 }, (_, p) => p), onchange: x => { position = x, offset = Math.max(offset, -x), draw() } })
  const offsetSlider = kit.slider({ name: 'offset', label: 'Offset k', format: kit.tick, choices: offsets, onchange: setOffset })
  const baseSlider = kit.slider({ name: 'base', label: 'Base', format: kit.tick, choices: bases,
    onchange: x => { base = x, measure(), draw() } })
  const picks = [['sinusoidal', 'sinusoidal rows'], ['rotary', 'rotary q and k']].map(([name, label]) =>
    ({ name, ...kit.pick('kind', () => { kind = name, measure(), draw() }, label) }))

  const key = (name, r) => s('svg', { viewBox: '0 -8 40 16', class: 'swatch', 'aria-hidden': 'true' },
    s('path', { d: 'M0 0h32', class: `hand ${name}` }), s('circle', { cx: 33, r, class: `end ${name}` }))
  root.append(
    h('style', {}, `
      path, circle, polyline { fill: none } .axis { stroke: #7f8790 } .grid { stroke: #7f879040 }
      .curve { stroke: ${paints[2]}; stroke-width: 2.5; stroke-linejoin: round } .guide { stroke: currentColor; stroke-dasharray: 3 4 }
      .mark { fill: ${paints[2]}; stroke: currentColor; stroke-width: 1.5 }
      .plot { touch-action: pan-y; user-select: none; cursor: ew-resize }
      .wedge { fill: #7f879044 } .hand { stroke-width: 4 } .end { stroke-width: 2.5 } .mine { stroke: ${paints[1]} } .end.mine { fill: ${paints[1]} }
      .other { stroke: ${paints[3]} } .hand.other { stroke-dasharray: 6 4 } .swatch { display: inline-block; width: 40px; height: 16px; margin-right: 6px; vertical-align: -3px }
      .legend { display: flex; flex-wrap: wrap; gap: 2px 20px; margin: 4px 0 8px } .legend > span { white-space: nowrap } .legend small { flex-basis: 100% }
      ul { display: grid; grid-template-columns: repeat(${Math.min(4, d / 2)}, minmax(0, 96px)); gap: 10px 8px; margin: 0; padding: 0; list-style: none }
      li { display: grid; justify-items: center; font-variant-numeric: tabular-nums; font-size: .92em; line-height: 1.3 } li svg { margin: 2px 0 4px }
      .kinds { display: flex; flex-wrap: wrap; gap: 6px } .kinds .pick > span { padding: 6px 12px; border-color: #7f8790 }
      .sliders { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 0 32px; margin-top: 8px }
      .reading { margin: 12px 0; font-size: 1.1em; min-height: 2.8em }
      @container (min-width: 560px) { ul { grid-template-columns: repeat(${d / 2}, minmax(0, 96px)) } .reading { min-height: 0 } }`),
    ...(q ? [h('fieldset', {}, h('legend', { class: 'spoken' }, 'Which positions'), h('div', { class: 'kinds' }, ...picks.map(p => p.node)))] : []),
    h('div', { class: 'sliders' }, positionSlider.node, offsetSlider.node, baseSlider.node),
    h('p', { class: 'legend note' }, h('span', {}, key('mine', 3.5), legend[0]), h('span', {}, key('other', 5.5), legend[1]),
      h('small', {}, 'A clock per pair of columns. Below it: positions per turn, angle from hand to hand, ', h('strong', {}, 'product of the pair'), '.')),
    h('ul', {}, ...clocks.map(c => c.node)), sentence,
    h('p', { class: 'head' }, 'Dot product at offset k: ', total), plot)
  measure(), draw()
  new ResizeObserver(drawPlot).observe(plot)
}
