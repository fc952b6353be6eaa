/* Softmax with a temperature. data: {labels, scores, temperature, min, max}; min and max bound the temperature. */
const FIGURE = (kit, root, data) => {
  const { h, value, show, fixed, number, col } = kit
  const { labels, scores } = data
  kit.numbers(scores, 'scores')
  kit.need(labels?.length === scores.length, '“labels” must name each score')
  const n = scores.length, full = Math.log(n)

  const rows = scores.map((score, i) => {
    const scaled = value(`scaled-${i}`), weight = value(`weight-${i}`), bar = kit.bar(0, 1, 1)
    const node = kit.tr(labels[i], number(fixed(score)), number(scaled), bar.cell, number(weight))
    return { node, scaled, weight, bar }
  })
  const entropy = value('entropy'), choices = value('choices'), entropyBar = kit.bar(0, full, 2)

  const draw = T => {
    const scaled = scores.map(x => x / T), weights = kit.softmax(scaled), H = kit.entropy(weights)
    rows.forEach((row, i) => {
      show(row.scaled, scaled[i], kit.short)
      show(row.weight, weights[i], x => kit.percent(x, 1))
      row.bar.set(weights[i])
    })
    show(entropy, H), show(choices, Math.exp(H)), entropyBar.set(H)
    control.set(T, `entropy ${fixed(H)} nats, like ${fixed(Math.exp(H))} choices`)
  }
  const control = kit.temperature(data, ['T → 0', 'T large'], draw)

  root.append(
    h('style', {}, `
      .row { margin-bottom: 14px } tbody th { width: 1%; white-space: nowrap } .bar { height: 18px }
      .entropy { display: grid; gap: 4px; margin-top: 16px } .ends { display: flex; justify-content: space-between }`),
    control.node, control.presets,
    kit.table([h('td'), col('score'), col('score ÷ T'), col('weight', 'softmax of score\u00a0÷\u00a0T')],
      rows.map(r => r.node)),
    h('div', { class: 'entropy' },
      h('p', {}, h('span', { class: 'head' }, 'Entropy '), entropy, ' nats: like an even choice among ', choices, ` of ${n}`),
      entropyBar.cell.firstChild,
      h('div', { class: 'ends note' }, h('span', {}, '0: one takes all'), h('span', {}, `ln ${n} = ${fixed(full)}: all alike`))))
  draw(data.temperature)
}
