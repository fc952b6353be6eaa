/* A dictionary that answers between its keys. data: {keys, values, query, temperature, min, max, query_min, query_max};
 * min and max bound the temperature, query_min and query_max (optional) the query. The score of a key is
 * −(query − key)² / 2, so softmax(score / T) is a bell of width √T around the query. */
const FIGURE = (kit, root, data) => {
  const { h, s, value, show, fixed, number, col } = kit
  const { keys, values } = data
  kit.numbers(keys, 'keys')
  kit.numbers(values, 'values', keys.length)
  const first = Math.min(...keys), last = Math.max(...keys), spare = (last - first) / 6 || 1
  const { query_min: left = first - spare, query_max: right = last + spare } = data
  kit.numbers([left, right, data.query], 'query and its range')
  kit.need(left <= data.query && data.query <= right && left < right, '“query” must lie in its range')

  let query = data.query, T = data.temperature
  const attend = query => {
    const weights = kit.softmax(keys.map(key => -((query - key) ** 2) / (2 * T)))
    return { weights, output: kit.dot(weights, values) }
  }

  // Drawn at its real size, so that its text stays readable on a phone. Screen readers have the table.
  const plot = s('svg', { 'aria-hidden': 'true', height: 270 })
  const drawPlot = ({ weights, output }) => {
    const box = { left: 40, right: (plot.clientWidth || 600) - 10, top: 26, bottom: 224 }
    const low = Math.min(...values), high = Math.max(...values), room = (high - low) * 0.12 || 1
    const x = key => box.left + (box.right - box.left) * (key - left) / (right - left)
    const y = value => box.bottom - (box.bottom - box.top) * (value - low + room) / (high - low + 2 * room)
    const at = i => left + (right - left) * i / 400
    const curve = Array.from({ length: 401 }, (_, i) => `${x(at(i)).toFixed(1)},${y(attend(at(i)).output).toFixed(1)}`)
    const text = (content, x, y, anchor = 'start') => s('text', { x, y, 'text-anchor': anchor }, content)
    const line = (...points) => s('polyline', { points: points.join(' '), class: 'axis' })
    plot.replaceChildren(
      line(box.left, box.top, box.left, box.bottom, box.right, box.bottom),
      ...kit.ticks(left, right, box.right / 80).flatMap(t =>
        [line(x(t), box.bottom, x(t), box.bottom + 5), text(kit.tick(t), x(t), box.bottom + 19, 'middle')]),
      ...kit.ticks(low - room, high + room, 5).flatMap(t =>
        [line(box.left - 5, y(t), box.left, y(t)), text(kit.tick(t), box.left - 8, y(t) + 4, 'end')]),
      text('key, query', box.right, box.bottom + 38, 'end'), text('value, output', 0, 12),
      s('polyline', { points: curve.join(' '), class: 'curve' }),
      s('polyline', { points: `${x(query)},${box.bottom} ${x(query)},${y(output)} ${box.left},${y(output)}`, class: 'guide' }),
      // Area, not radius, goes with the weight; the ring shows where a forgotten key is.
      ...keys.flatMap((key, i) => [18 * Math.sqrt(weights[i]), 4].map((r, ring) =>
        s('circle', { cx: x(key), cy: y(values[i]), r, class: ring ? 'ring' : 'weight' }))),
      s('path', { d: `M${x(query)} ${y(output) - 9}l9 9l-9 9l-9 -9z`, class: 'output' }))
  }

  const rows = keys.map((key, i) => {
    const weight = value(`weight-${i}`), bar = kit.bar(0, 1, 1)
    const title = h('th', { scope: 'row', class: 'number' }, fixed(key))
    return { weight, bar, node: h('tr', {}, title, number(fixed(values[i])), bar.cell, number(weight)) }
  })
  const output = value('output')

  const draw = () => {
    const now = attend(query)
    rows.forEach((row, i) => {
      show(row.weight, now.weights[i], x => kit.percent(x, 1))
      row.bar.set(now.weights[i])
    })
    show(output, now.output)
    querySlider.set(query, `query ${fixed(query)}, output ${fixed(now.output)}`)
    heat.set(T, `output ${fixed(now.output)}`)
    drawPlot(now)
  }
  const querySlider = kit.slider({ name: 'query', label: 'Query', min: left, max: right, format: fixed,
    onchange: x => { query = x; draw() } })
  const heat = kit.temperature(data, ['T → 0: the nearest key', 'T large: mean of all'], x => { T = x; draw() })

  root.append(
    h('style', {}, `
      polyline { fill: none } .axis { stroke: #7f8790 } .guide { stroke: currentColor; stroke-dasharray: 3 4 }
      .curve { stroke: #d9770f; stroke-width: 2.5; stroke-linejoin: round }
      .output { fill: #d9770f; stroke: currentColor; stroke-width: 1.5 }
      .weight { fill: #3a86d6; opacity: .85 } .ring { fill: none; stroke: currentColor; stroke-width: 1.5 }
      .answer { margin-bottom: 12px; font-size: 1.1em; text-align: center } .sliders { display: grid; gap: 0 32px }
      .row { margin: 4px 0 16px } @container (min-width: 560px) { .sliders { grid-template-columns: 1fr 1fr } }`),
    plot,
    h('p', { class: 'answer' }, 'output = Σ weight × value = ', output),
    h('div', { class: 'sliders' }, querySlider.node, heat.node), heat.presets,
    kit.table([col('key'), col('value'), col('weight', 'softmax of −(query − key)² ÷ 2T')],
      rows.map(r => r.node)))
  draw()
  new ResizeObserver(draw).observe(plot)
}
