/* Two ways over the tiles of the scores: a program that holds queries walks along a row, one that holds keys walks down a
 * column. data: {n, heads, causal, sweep, tile, step}: n tiles of queries and of keys, and what is shown at the start:
 * sweep 0 is the keys' kernel, 1 the queries'; `tile` is the one that the program holds, `step` how many it has met. */
const FIGURE = (kit, root, data) => {
  const { h, s, value, show, need, number } = kit
  const { n } = data
  let { causal, sweep, tile, step } = data
  need(Number.isInteger(n) && 2 <= n && n <= 12, '“n” must be a whole number from 2 to 12')
  need(typeof causal === 'boolean', '“causal” must be true or false')
  need([0, 1].includes(sweep), '“sweep” must be 0 or 1')
  need(Number.isInteger(tile) && 0 <= tile && tile < n, `“tile” must be a whole number from 0 to ${n - 1}`)
  need(Number.isInteger(step) && 0 <= step && step <= n, `“step” must be a whole number from 0 to ${n}`)

  const names = ['Keys’ kernel: dK, dV', 'Queries’ kernel: dQ']
  const products = [4, 3]   // for each tile: S, dP, dV, dK; S, dP, dQ
  const seen = (i, j) => !causal || j <= i
  const walk = (which, held) => Array.from({ length: n }, (_, x) => which === 0 ? [x, held] : [held, x]).filter(([i, j]) => seen(i, j))

  const map = s('svg', { 'aria-hidden': 'true', viewBox: `-0.1 -0.1 ${n + 0.2} ${n + 0.2}`, class: 'map' })
  const met = value('met'), done = value('done'), tiles = value('tiles'), both = value('both'), five = value('five')
  const reading = h('p', { class: 'reading', 'data-value': 'reading', 'aria-live': 'polite' })
  const whole = x => kit.fixed(x, 0)
  const draw = () => {
    const path = walk(sweep, tile)
    step = Math.min(step, path.length)
    const at = path[step - 1], before = path.slice(0, Math.max(step - 1, 0))
    const is = (list, i, j) => list.some(([a, b]) => a === i && b === j)
    map.replaceChildren(...Array.from({ length: n * n }, (_, x) => [Math.floor(x / n), x % n]).map(([i, j]) => s('rect', {
      x: j + 0.06, y: i + 0.06, width: 0.88, height: 0.88, rx: 0.08,
      class: !seen(i, j) ? 'hidden' : at && at[0] === i && at[1] === j ? 'now' : is(before, i, j) ? 'met' : is(path, i, j) ? 'held' : 'other',
    })))
    const all = n * n - (causal ? n * (n - 1) / 2 : 0)
    show(met, step, whole), show(done, step * products[sweep], whole)
    show(tiles, all, whole), show(both, 7 * all, whole), show(five, 5 * all, whole)
    const [holds, meets, sums] = sweep === 0 ? ['keys and values', 'queries', 'dK and dV'] : ['queries', 'keys and values', 'dQ']
    reading.replaceChildren(h('strong', {}, `Program ${tile}`), ` holds tile ${tile} of the ${holds}. ${path.length} tiles of ${meets} pass by, and it adds to its ${sums}.`)
    tileSlider.set(tile, `tile ${tile} of the ${holds}`)
    stepSlider.set(step, `${step} of ${path.length} tiles met`)
    picks.forEach((pick, i) => { pick.input.checked = i === sweep })
    causalBox.checked = causal
  }
  const count = (from, to) => Array.from({ length: to - from + 1 }, (_, i) => from + i)
  const tileSlider = kit.slider({ name: 'tile', label: 'The tile it holds', choices: count(0, n - 1), format: kit.tick, onchange: x => { tile = x; draw() } })
  const stepSlider = kit.slider({ name: 'step', label: 'Tiles that have passed by', choices: count(0, n), format: kit.tick, onchange: x => { step = x; draw() } })
  const picks = names.map((name, i) => kit.pick('sweep', () => { sweep = i; draw() }, name))
  const causalBox = h('input', { type: 'checkbox', id: 'causal', onchange: () => { causal = causalBox.checked; draw() } })

  root.append(
    h('style', {}, `
      .controls { display: grid; gap: 0 32px }
      .sweeps { display: flex; flex-wrap: wrap; gap: 4px 8px; margin: 4px 0 8px } .sweeps .pick span { padding: 6px 10px }
      .check { display: flex; align-items: center; min-height: 40px; cursor: pointer }
      .check input { width: 22px; height: 22px; margin: 0 10px 0 0; accent-color: #3a86d6 }
      .panels { display: grid; gap: 16px 36px; align-items: start } .panels > div { min-width: 0 }
      .map { max-width: 340px } .axes { display: flex; justify-content: space-between; max-width: 340px }
      rect { forced-color-adjust: none; print-color-adjust: exact; stroke-width: .04 }
      .hidden { fill: none; stroke: #7f8790; stroke-dasharray: .12 .1 } .other { fill: #7f8790; fill-opacity: .18; stroke: #7f8790 }
      .held { fill: #3a86d6; fill-opacity: .22; stroke: #3a86d6 } .met { fill: #3a86d6; fill-opacity: .75; stroke: #3a86d6 }
      .now { fill: #d9770f; stroke: currentColor; stroke-width: .08 }
      .reading { margin: 8px 0 14px; min-height: 4.2em }
      @container (min-width: 620px) { .controls, .panels { grid-template-columns: 1fr 1fr } .reading { min-height: 1.4em } }`),
    h('fieldset', { class: 'sweeps', 'aria-label': 'Which kernel' }, ...picks.map(pick => pick.node)),
    h('div', { class: 'controls' }, tileSlider.node, stepSlider.node, h('label', { class: 'check head' }, causalBox, 'Causal')),
    reading,
    h('div', { class: 'panels' },
      h('div', {}, h('p', { class: 'axes' }, h('small', {}, 'queries ↓'), h('small', {}, 'keys →')), map),
      h('table', {}, h('tbody', {},
        h('tr', {}, h('th', { scope: 'row' }, 'tiles that it has met'), number(met)),
        h('tr', {}, h('th', { scope: 'row' }, 'products of matrices so far'), number(done)),
        h('tr', {}, h('th', { scope: 'row' }, 'tiles that are visible'), number(tiles)),
        h('tr', {}, h('th', { scope: 'row' }, 'products, by both kernels'), number(both)),
        h('tr', {}, h('th', { scope: 'row' }, 'products, if each were done once'), number(five))))))
  draw()
}
