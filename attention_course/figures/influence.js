/* How much of a token is left, some tokens later. data: {distances, curves: [{label, kind, gain, influence}]}; of the
 * curves of kind "rnn", which have a gain, the reader chooses one; those of any other kind are always there. Optional:
 * distance and gain to begin with, and gain_label. The vertical axis is logarithmic, the same for every gain. */
const FIGURE = (kit, root, data) => {
  const { h, s, value, show, need, number, tr } = kit
  const { distances, curves, gain_label: gainLabel = 'Gain of the recurrent matrix' } = data
  kit.numbers(distances, 'distances')
  need(distances.every((x, i) => i === 0 || x > distances[i - 1]), '“distances” must rise')
  need(Array.isArray(curves) && curves.length > 0, '“curves” must be a list of curves')
  for (const { label, kind, gain, influence } of curves) {
    kit.numbers(influence, `influence of ${label}`, distances.length)
    need(influence.every(x => x > 0), `the influence of ${label} must be above 0, for the axis is logarithmic`)
    need(kind !== 'rnn' || Number.isFinite(gain), `${label} needs a gain`)
  }
  const gains = curves.filter(c => c.kind === 'rnn').map(c => c.gain).sort((a, b) => a - b)
  need(new Set(gains).size === gains.length, 'two curves have the same gain')
  const middle = xs => xs[Math.floor(xs.length / 2)]
  let { distance = middle(distances), gain = middle(gains) } = data
  need(distances.includes(distance), '“distance” must be one of the distances')
  need(gain === undefined || gains.includes(gain), '“gain” must be one of the gains')

  const visible = () => curves.filter(c => c.kind !== 'rnn' || c.gain === gain)
  need(visible().length <= 5, 'more than five curves would be a tangle')
  const name = c => c.kind === 'rnn' && gains.length > 1 ? `${c.label} (gain ${kit.tick(c.gain)})` : c.label

  // 0.0032, 0.32, 12, 340; beyond these a power of ten.
  const raised = n => String(n).replace(/./g, c => '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'['-0123456789'.indexOf(c)])
  const scientific = x => {
    if (x >= 0.00095 && x < 9950) return x.toFixed(Math.max(0, 1 - Math.floor(Math.log10(x * 1.0000001))))
    const [digits, exponent] = x.toExponential(1).split('e')
    return `${digits}·10${raised(Number(exponent))}`
  }

  // Each curve has its paint, its dashes and its mark.
  const looks = [[3, '', 'M-6 -6h12v12h-12z'], [1, '9 4', 'M0 -7.5l7.5 7.5l-7.5 7.5l-7.5 -7.5z'],
    [2, '2 4', 'M0 -7l7 12h-14z'], [4, '12 4 2 4', 'M-2.5 -7h5v4.5h4.5v5h-4.5v4.5h-5v-4.5h-4.5v-5h4.5z'],
    [5, '5 3', 'M-7 -5h14l-7 12z']].map(([paint, dashes, mark]) => ({ paint: kit.paints[paint], dashes, mark }))
  const line = (points, { paint, dashes }) =>
    s('polyline', { points, class: 'curve', stroke: paint, 'stroke-dasharray': dashes })
  const mark = (x, y, { paint, mark }) => s('path', { d: mark, transform: `translate(${x} ${y})`, class: 'mark', fill: paint })

  // Drawn at its real size, so that its text stays readable on a phone. Screen readers have the table.
  const plot = s('svg', { 'aria-hidden': 'true', height: 300 })
  const all = curves.flatMap(c => c.influence).map(Math.log10)
  const low = Math.min(...all), high = Math.max(...all, low + 1), room = (high - low) * 0.04
  const [first, last] = [distances[0], distances.at(-1)]
  const box = () => ({ left: 46, right: (plot.clientWidth || 600) - 12, top: 28, bottom: 254 })
  const drawPlot = () => {
    const { left, right, top, bottom } = box(), at = distances.indexOf(distance)
    const x = d => left + 8 + (right - left - 8) * (d - first) / (last - first || 1)
    const y = power => bottom - (bottom - top) * (power - low + room) / (high - low + 2 * room)
    const axis = (...points) => s('polyline', { points: points.join(' '), class: 'axis' })
    const text = (content, x, y, anchor = 'start') => s('text', { x, y, 'text-anchor': anchor }, content)
    const powers = kit.ticks(low - room, high + room, 6).filter(Number.isInteger)
    plot.replaceChildren(
      ...powers.map(t => s('polyline', { points: `${left} ${y(t)} ${right} ${y(t)}`, class: 'grid' })),
      axis(left, top, left, bottom, right, bottom),
      ...powers.map(t => text(t === 0 ? '1' : t === 1 ? '10' : `10${raised(t)}`, left - 7, y(t) + 4, 'end')),
      ...kit.ticks(first, last, right / 80).filter(Number.isInteger).flatMap(t =>
        [axis(x(t), bottom, x(t), bottom + 5), text(kit.tick(t), x(t), bottom + 19, 'middle')]),
      text('influence, logarithmic', 0, 13), text('distance, in tokens', right, bottom + 38, 'end'),
      s('polyline', { points: `${x(distance)},${top} ${x(distance)},${bottom}`, class: 'guide' }),
      ...visible().map((c, k) => line(c.influence.map((v, i) => `${x(distances[i])},${y(Math.log10(v))}`).join(' '), looks[k])),
      ...visible().map((c, k) => mark(x(distance), y(Math.log10(c.influence[at])), looks[k])))
  }
  // The plot may be touched too; a finger that goes up or down still moves the page.
  const point = event => {
    const { left, right } = box(), part = (event.clientX - plot.getBoundingClientRect().left - left - 8) / (right - left - 8)
    const wanted = first + part * (last - first)
    distance = distances.reduce((best, d) => Math.abs(d - wanted) < Math.abs(best - wanted) ? d : best)
    draw()
  }
  plot.addEventListener('pointerdown', point)
  plot.addEventListener('pointermove', event => { if (event.buttons) point(event) })

  const rows = visible().map((_, k) => {
    const title = h('span', {}), now = value(`influence-${k}`), ratio = value(`ratio-${k}`)
    const swatch = s('svg', { 'aria-hidden': 'true', viewBox: '0 -10 44 20', class: 'swatch' },
      line('0,0 44,0', looks[k]), mark(22, 0, looks[k]))
    return { title, now, ratio, node: tr(h('span', { class: 'name' }, swatch, title), number(now), number(ratio, '\u00a0×')) }
  })
  const head = (title, note) => h('th', { scope: 'col', class: 'number' }, title, h('small', {}, note))
  const here = h('small'), reading = h('p', { class: 'reading', 'data-value': 'reading', 'aria-live': 'polite' })

  const ago = d => d === 1 ? '1 token back' : `${d} tokens back`
  const draw = () => {
    const at = distances.indexOf(distance)
    distanceSlider.set(distance, ago(distance))
    if (gains.length > 1) gainSlider.set(gain, `gain ${kit.tick(gain)}`)
    here.textContent = `${distance} back`
    const ratios = visible().map((c, k) => {
      const ratio = c.influence[0] / c.influence[at]
      rows[k].title.textContent = name(c)
      show(rows[k].now, c.influence[at], scientific)
      show(rows[k].ratio, ratio, scientific)
      return ratio
    })
    reading.replaceChildren(...(distance === first ? [`${ago(first)}: the nearest token, with which the others are compared.`]
      : [`From ${first} to ${distance} tokens back, influence `, ...visible().flatMap((c, k) => [k ? '; ' : '',
        k && ratios[k] < 1 === ratios[k - 1] < 1 ? '' : ratios[k] < 1 ? 'grows ' : 'shrinks ', h('strong', {}, `${scientific(Math.max(ratios[k], 1 / ratios[k]))}\u00a0×`),
        ` in ${name(c)}`]), '.']))
    drawPlot()
  }

  const distanceSlider = kit.slider({ name: 'distance', label: 'Distance, in tokens', choices: distances, format: kit.tick,
    onchange: x => { distance = x; draw() } })
  const gainSlider = kit.slider({ name: 'gain', label: gainLabel, choices: gains, format: kit.tick,
    onchange: x => { gain = x; draw() } })

  root.append(
    h('style', {}, `
      polyline { fill: none } .axis { stroke: #7f8790 } .grid { stroke: #7f879040 }
      .guide { stroke: currentColor; stroke-dasharray: 3 4 } .curve { stroke-width: 2.5; stroke-linejoin: round }
      .mark { stroke: currentColor; stroke-width: 1.5 }
      svg { touch-action: pan-y; user-select: none } svg:not(.swatch) { cursor: ew-resize }
      .name { display: flex; align-items: center; gap: 10px } .swatch { flex: none; width: 44px; height: 20px }
      .sliders { display: grid; grid-template-columns: repeat(auto-fit, minmax(250px, 1fr)); gap: 0 32px; margin-top: 4px } .reading { margin: 4px 0 14px; font-size: 1.1em }
      @container (max-width: 420px) { .name { gap: 6px } .swatch { width: 30px } }`),
    plot,
    h('div', { class: 'sliders' }, distanceSlider.node, ...(gains.length > 1 ? [gainSlider.node] : [])),
    reading,
    kit.table([h('td'), h('th', { scope: 'col', class: 'number' }, 'influence', here),
      head('times less', `than ${first} back`)], rows.map(r => r.node)))
  draw()
  new ResizeObserver(drawPlot).observe(plot)
}
