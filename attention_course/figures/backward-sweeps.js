/* Two ways over the tiles of the scores: the keys' kernel holds a tile of keys and walks down its column, the queries'
 * kernel holds a tile of queries and walks along its row. data: {n, causal, sweep, tile, step}: n tiles of queries and
 * of keys, and what is shown at the start: sweep 0 is the keys' kernel, 1 the queries'; `tile` is the one that the
 * program holds, `step` how many have passed by. */
const FIGURE = (kit, root, data) => {
  const { h, s, value, show, need, number } = kit
  const { n } = data
  let { causal, sweep, tile, step } = data
  const seen = (i, j) => !causal || j <= i
  const walk = () => Array.from({ length: n }, (_, x) => sweep === 0 ? [x, tile] : [tile, x]).filter(([i, j]) => seen(i, j))
  need(Number.isInteger(n) && 2 <= n && n <= 8, '“n” must be a whole number from 2 to 8')
  need(typeof causal === 'boolean', '“causal” must be true or false')
  need([0, 1].includes(sweep), '“sweep” must be 0 or 1')
  need(Number.isInteger(tile) && 0 <= tile && tile < n, `“tile” must be a whole number from 0 to ${n - 1}`)
  need(Number.isInteger(step) && 0 <= step && step <= walk().length, `“step” must be a whole number from 0 to ${walk().length}`)

  const kernels = [
    { name: 'Keys’ kernel', holds: 'keys and values', passes: 'queries', products: ['S', 'Ṗ', 'V̇', 'K̇'], sums: ['K̇', 'V̇'] },
    { name: 'Queries’ kernel', holds: 'queries', passes: 'keys and values', products: ['S', 'Ṗ', 'Q̇'], sums: ['Q̇'] },
  ]
  const once = new Set(kernels.flatMap(kernel => kernel.products)).size   // products of a tile, none of them twice
  const twice = kit.sum(kernels.map(kernel => kernel.products.length))

  // One unit is one tile. Left of the tiles of scores stand the queries, above them the keys, at the far ends the sums.
  const box = (x, y, kind, text, height = 0.88) => [
    s('rect', { x: x + 0.06, y: y + 0.06, width: 0.88, height, rx: 0.08, class: kind }),
    s('text', { x: x + 0.5, y: y + 0.2 + height / 2, 'text-anchor': 'middle' }, text)]
  const map = s('svg', { 'aria-hidden': 'true', viewBox: `-1.3 -1.3 ${n + 2.6} ${n + 3.3}`, class: 'map' })
  const drawMap = path => {
    const place = (i, j) => path.findIndex(([a, b]) => a === i && b === j)   // when this program comes by, -1 is never
    const kind = (i, j) => !seen(i, j) ? 'skipped' : place(i, j) < 0 ? 'other' : place(i, j) >= step ? 'later' : place(i, j) === step - 1 ? 'now' : 'met'
    const now = path[step - 1] ?? [-1, -1], which = sweep === 0 ? 1 : 0   // what it holds: the column or the row
    const beside = (axis, x) => which === axis ? x === tile ? 'holds' : 'idle' : x === now[axis] ? 'now' : 'idle'
    const all = Array.from({ length: n }, (_, x) => x)
    map.replaceChildren(
      ...all.flatMap(i => box(-1.25, i, beside(0, i), i)), ...all.flatMap(j => box(j, -1.25, beside(1, j), j)),
      ...all.flatMap(i => all.flatMap(j => box(j, i, kind(i, j), place(i, j) < 0 ? '' : place(i, j) + 1))),
      ...kernels[sweep].sums.flatMap((name, x) => {
        const sum = step === path.length ? 'written' : 'sum'
        return sweep === 0 ? box(tile, n + 0.25 + 0.8 * x, sum, name, 0.68) : box(n + 0.25, tile, sum, name)
      }))
  }

  const counts = Object.fromEntries(['met', 'products', 'visible', 'both', 'once'].map(name => [name, value(name)]))
  const reading = h('p', { class: 'reading', 'data-value': 'reading', 'aria-live': 'polite' })
  const swatch = kind => s('svg', { 'aria-hidden': 'true', viewBox: '0 0 1 1', class: 'swatch' },
    s('rect', { x: 0.06, y: 0.06, width: 0.88, height: 0.88, rx: 0.08, class: kind }))
  const whole = x => kit.fixed(x, 0)
  const draw = () => {
    const path = walk(), { holds, passes, products, sums } = kernels[sweep]
    step = Math.min(step, path.length)
    drawMap(path)
    const visible = kit.sum(Array.from({ length: n * n }, (_, x) => seen(Math.floor(x / n), x % n) ? 1 : 0))
    show(counts.met, step, whole), show(counts.products, step * products.length, whole)
    show(counts.visible, visible, whole), show(counts.both, visible * twice, whole), show(counts.once, visible * once, whole)
    const last = step === path.length, writes = `${sums.join(' and ')} ${sums.length > 1 ? 'are' : 'is'} written`
    reading.replaceChildren(h('strong', {}, `Program ${tile}`), ` holds tile ${tile} of the ${holds}. `,
      ...(step === 0 ? [`Tiles of ${passes} will pass by, ${path.length} in all.`]
        : [`Tile ${path[step - 1][sweep]} of the ${passes} passes by, number ${step} of ${path.length}: products for ${products.join(', ')}.`, last ? ` Then ${writes}, once.` : '']))
    tileSlider.set(tile, `tile ${tile} of the ${holds}`)
    stepSlider.node.querySelector('input').max = path.length
    stepSlider.set(step, `${step} of ${path.length} tiles of ${passes}`)
    picks.forEach((pick, i) => { pick.input.checked = i === sweep })
    causalBox.checked = causal
  }
  const upTo = last => Array.from({ length: last + 1 }, (_, x) => x)
  const picks = kernels.map(({ name }, i) => kit.pick('sweep', () => { sweep = i; draw() }, name))
  const tileSlider = kit.slider({ name: 'tile', label: 'Tile that the program holds', choices: upTo(n - 1), format: kit.tick, onchange: x => { tile = x; draw() } })
  const stepSlider = kit.slider({ name: 'step', label: 'Tiles that passed by', choices: upTo(n), format: kit.tick, onchange: x => { step = x; draw() } })
  const causalBox = h('input', { type: 'checkbox', id: 'causal', onchange: () => { causal = causalBox.checked; draw() } })

  const row = (kind, title, output) => h('tr', {}, h('th', { scope: 'row' }, kind ? swatch(kind) : '', title), number(output))
  const legend = [['holds', 'held'], ['now', 'passes by now'], ['met', 'was here'], ['later', 'will be'], ['other', 'for other programs'], ['skipped', 'hidden, skipped'], ['sum', 'being added up']]
  root.append(
    h('style', {}, `
      .sweeps { display: flex; flex-wrap: wrap; gap: 4px 8px; margin: 4px 0 8px } .sweeps .pick span { padding: 6px 10px }
      .controls { display: grid; gap: 0 32px }
      .check { display: flex; align-items: center; min-height: 40px; cursor: pointer }
      .check input { width: 22px; height: 22px; margin: 0 10px 0 0; accent-color: #3a86d6 }
      .panels { display: grid; gap: 16px 36px; align-items: start } .panels > div { min-width: 0 }
      .map { max-width: 400px; font-size: .42px } .axes { display: flex; justify-content: space-between; max-width: 400px }
      rect { forced-color-adjust: none; print-color-adjust: exact; fill: none; stroke: #7f8790; stroke-width: .04 }
      .other { fill: #7f8790; fill-opacity: .18 } .skipped { stroke-dasharray: .12 .1 }
      .later { stroke: #3a86d6; stroke-width: .07 } .met { fill: #3a86d6; fill-opacity: .4; stroke: #3a86d6; stroke-width: .07 }
      .now { fill: #d9770f; fill-opacity: .45; stroke: currentColor; stroke-width: .09 }
      .holds { fill: #22997a; fill-opacity: .4; stroke: #22997a; stroke-width: .09 }
      .sum { stroke: #22997a; stroke-width: .07; stroke-dasharray: .12 .1 } .written { fill: #22997a; fill-opacity: .4; stroke: #22997a; stroke-width: .09 }
      .swatch { display: inline-block; width: 20px; height: 20px; margin-right: 8px; vertical-align: -4px }
      .legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0 0 12px; font-size: .92em } .legend span { white-space: nowrap }
      .reading { margin: 8px 0 14px; min-height: 5.6em }
      @container (min-width: 620px) { .controls, .panels { grid-template-columns: 1fr 1fr } .reading { min-height: 2.8em } }`),
    h('fieldset', { class: 'sweeps', 'aria-label': 'Kernel' }, ...picks.map(pick => pick.node)),
    h('div', { class: 'controls' }, tileSlider.node, stepSlider.node, h('label', { class: 'check head' }, causalBox, 'Causal')),
    reading,
    h('div', { class: 'panels' },
      h('div', {}, h('p', { class: 'axes' }, h('small', {}, 'tiles of queries ↓'), h('small', {}, 'tiles of keys and values →')), map),
      h('div', {},
        h('p', { class: 'legend' }, ...legend.map(([kind, says]) => h('span', {}, swatch(kind), says))),
        h('table', {}, h('tbody', {},
          row('', 'tiles met by this program', counts.met),
          row('', 'products of matrices for them', counts.products),
          row('', 'tiles that are not hidden', counts.visible),
          row('', 'products in all, by both kernels', counts.both),
          row('', 'products in all, if none were done twice', counts.once))))))
  draw()
}
