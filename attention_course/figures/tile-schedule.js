/* Which tiles of the scores are computed. data: {n, blocks, block_q, block_k, causal, window}: n queries and n keys, the
 * sizes of blocks that can be chosen, and what is shown at the start; `window` counts positions, the query's own
 * included, 0 is none. A tile is skipped if no pair of it is visible, and whole if all are. */
const FIGURE = (kit, root, data) => {
  const { h, s, value, show, need, number, percent } = kit
  const { n, blocks } = data
  need(Number.isInteger(n) && 0 < n && n <= 32, '“n” must be a whole number from 1 to 32')
  kit.numbers(blocks, 'blocks')
  need(blocks.every((x, i) => Number.isInteger(x) && x > (blocks[i - 1] ?? 0)), '“blocks” must be whole numbers that rise')
  let { block_q: blockQ, block_k: blockK, causal = false, window = 0 } = data
  need(blocks.includes(blockQ), '“block_q” must be one of the blocks')
  need(blocks.includes(blockK), '“block_k” must be one of the blocks')
  need(Number.isInteger(window) && 0 <= window && window <= n, `“window” must be a whole number from 0 to ${n}`)
  need(typeof causal === 'boolean', '“causal” must be true or false')

  const visible = (i, j) => (!causal || j <= i) && (window === 0 || Math.abs(i - j) < window)
  const tiles = () => {
    const found = []
    for (let i = 0; i < n; i += blockQ) {
      for (let j = 0; j < n; j += blockK) {
        const height = Math.min(blockQ, n - i), width = Math.min(blockK, n - j)
        let seen = 0
        for (let a = i; a < i + height; a++) for (let b = j; b < j + width; b++) seen += visible(a, b)
        found.push({ i, j, height, width, seen, pairs: height * width })
      }
    }
    return found
  }

  // One unit is one pair. Squares that are visible are filled; a tile that is computed has a frame, one that is skipped a cross.
  const map = s('svg', { 'aria-hidden': 'true', viewBox: `-0.2 -0.2 ${n + 0.4} ${n + 0.4}`, class: 'map' })
  const drawMap = found => map.replaceChildren(
    ...found.flatMap(({ i, j, height, width, seen, pairs }) => {
      const frame = s('rect', { x: j + 0.06, y: i + 0.06, width: width - 0.12, height: height - 0.12, class: seen ? 'computed' : 'skipped' })
      const cross = s('path', { d: `M${j + 0.1} ${i + 0.1}L${j + width - 0.1} ${i + height - 0.1}`, class: 'cross' })
      const squares = []
      if (seen) {
        for (let a = i; a < i + height; a++) {
          for (let b = j; b < j + width; b++) {
            squares.push(s('rect', { x: b + 0.14, y: a + 0.14, width: 0.72, height: 0.72,
              class: visible(a, b) ? seen === pairs ? 'whole' : 'part' : 'idle' }))
          }
        }
      }
      return seen ? [...squares, frame] : [frame, cross]
    }))

  const counts = Object.fromEntries(['whole', 'partly', 'skipped', 'computed', 'visible', 'wasted', 'useful', 'loaded'].map(name => [name, value(name)]))
  const swatch = kind => s('svg', { 'aria-hidden': 'true', viewBox: '0 0 1 1', class: 'swatch' }, ...(kind === 'skipped'
    ? [s('rect', { x: 0.06, y: 0.06, width: 0.88, height: 0.88, class: 'skipped' }), s('path', { d: 'M.1 .1L.9 .9', class: 'cross' })]
    : [s('rect', { x: 0.06, y: 0.06, width: 0.88, height: 0.88, class: 'computed' }), s('rect', { x: 0.2, y: 0.2, width: 0.6, height: 0.6, class: kind })]))
  const reading = h('p', { class: 'reading', 'data-value': 'reading', 'aria-live': 'polite' })
  const whole = x => kit.fixed(x, 0)

  const draw = () => {
    const found = tiles(), run = found.filter(t => t.seen)
    const computed = kit.sum(run.map(t => t.pairs)), seen = kit.sum(run.map(t => t.seen))
    drawMap(found)
    show(counts.whole, run.filter(t => t.seen === t.pairs).length, whole)
    show(counts.partly, run.filter(t => t.seen < t.pairs).length, whole)
    show(counts.skipped, found.length - run.length, whole)
    show(counts.computed, computed, whole), show(counts.visible, seen, whole)
    show(counts.wasted, computed - seen, whole)
    show(counts.useful, seen / computed, x => percent(x))
    show(counts.loaded, kit.sum(run.map(t => t.width)), whole)
    reading.replaceChildren(h('strong', {}, `${run.length} of ${found.length}`), ` tiles are computed, ${computed} pairs, of which ${seen} are visible.`)
    sliderQ.set(blockQ, `${blockQ} queries in a tile, ${run.length} of ${found.length} tiles computed`)
    sliderK.set(blockK, `${blockK} keys in a tile, ${run.length} of ${found.length} tiles computed`)
    windowSlider.set(window, window ? `a window of ${window}` : 'no window')
    causalBox.checked = causal
  }
  const sliderQ = kit.slider({ name: 'block_q', label: 'Queries in a tile', choices: blocks, format: kit.tick, onchange: x => { blockQ = x; draw() } })
  const sliderK = kit.slider({ name: 'block_k', label: 'Keys in a tile', choices: blocks, format: kit.tick, onchange: x => { blockK = x; draw() } })
  const windowSlider = kit.slider({ name: 'window', label: 'Window', choices: [...Array.from({ length: n }, (_, i) => i + 1), 0],
    format: x => x ? kit.tick(x) : 'off', onchange: x => { window = x; draw() } })
  const causalBox = h('input', { type: 'checkbox', id: 'causal', onchange: () => { causal = causalBox.checked; draw() } })

  const row = (kind, title, output) => h('tr', {}, h('th', { scope: 'row' }, kind ? swatch(kind) : '', title), number(output))
  root.append(
    h('style', {}, `
      .controls { display: grid; gap: 0 32px }
      .check { display: flex; align-items: center; min-height: 40px; cursor: pointer }
      .check input { width: 22px; height: 22px; margin: 0 10px 0 0; accent-color: #3a86d6 }
      .panels { display: grid; gap: 16px 36px; align-items: start } .panels > div { min-width: 0 }
      .map { max-width: 400px } .axes { display: flex; justify-content: space-between; max-width: 400px }
      rect, path { forced-color-adjust: none; print-color-adjust: exact }
      .computed { fill: none; stroke: currentColor; stroke-width: .09 } .skipped { fill: none; stroke: #7f8790; stroke-width: .05 }
      .cross { stroke: #7f8790; stroke-width: .07 }
      .whole { fill: #3a86d6 } .part { fill: #22997a } .idle { fill: none; stroke: #d9770f; stroke-width: .1 }
      .swatch { display: inline-block; width: 20px; height: 20px; margin-right: 8px; vertical-align: -4px }
      .reading { margin: 8px 0 14px; font-size: 1.08em; min-height: 2.8em }
      @container (min-width: 620px) { .controls, .panels { grid-template-columns: 1fr 1fr } .reading { min-height: 1.4em } }`),
    h('div', { class: 'controls' }, sliderQ.node, sliderK.node, h('label', { class: 'check head' }, causalBox, 'Causal'), windowSlider.node),
    reading,
    h('div', { class: 'panels' },
      h('div', {}, h('p', { class: 'axes' }, h('small', {}, 'query ↓'), h('small', {}, 'key →')), map),
      h('table', {}, h('tbody', {},
        row('whole', 'tiles without a hidden pair', counts.whole), row('part', 'tiles with hidden pairs', counts.partly),
        row('skipped', 'tiles skipped', counts.skipped), row('', 'pairs computed', counts.computed),
        row('', 'pairs visible', counts.visible), row('idle', 'pairs computed for nothing', counts.wasted),
        row('', 'of the computed, visible', counts.useful),
        row('', 'keys loaded, over all blocks of queries', counts.loaded)))))
  draw()
}
