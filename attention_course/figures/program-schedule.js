/* Which multiprocessor runs which program, and when all are done. data: {blocks, heads, workers}: lists of what can be
 * chosen, {block, head, worker}: what is shown at the start, and {order}: 0 first rows first, 1 longest first, 2 longest
 * first and dealt out beforehand. Block b of the queries, counted from 0, takes b + 1 units of time: it visits so many tiles. */
const FIGURE = (kit, root, data) => {
  const { h, s, value, show, need, number, percent, paints } = kit
  const names = ['First rows first', 'Longest first', 'Longest first, dealt out beforehand']
  let { block, head, worker, order } = data
  for (const [list, one] of [['blocks', 'block'], ['heads', 'head'], ['workers', 'worker']]) {
    kit.numbers(data[list], list)
    need(data[list].every((x, i) => Number.isInteger(x) && x > (data[list][i - 1] ?? 0)), `“${list}” must be whole numbers that rise`)
    need(data[list].includes(data[one]), `“${one}” must be one of the ${list}`)
  }
  need(data.blocks.at(-1) <= 12 && data.heads.at(-1) <= 6 && data.workers.at(-1) <= 8, 'at most 12 blocks, 6 heads and 8 workers fit')
  need([0, 1, 2].includes(order), '“order” must be 0, 1 or 2')

  const schedule = () => {
    const todo = []
    if (order === 0) for (let i = 0; i < head; i++) for (let b = 0; b < block; b++) todo.push({ head: i, block: b })
    else for (let b = block - 1; b >= 0; b--) for (let i = 0; i < head; i++) todo.push({ head: i, block: b })
    const rows = Array.from({ length: worker }, () => ({ programs: [], end: 0 }))
    todo.forEach((program, n) => {
      const free = order === 2 ? rows[n % worker] : rows.reduce((a, b) => b.end < a.end ? b : a)
      free.programs.push({ ...program, start: free.end, n })
      free.end += program.block + 1
    })
    return rows
  }

  const chart = s('svg', { 'aria-hidden': 'true', class: 'chart' })
  const end = value('end'), even = value('even'), busy = value('busy')
  const reading = h('p', { class: 'reading', 'data-value': 'reading', 'aria-live': 'polite' })
  const whole = x => kit.fixed(x, 0)
  let now
  const place = () => {
    const width = chart.clientWidth || 600, left = 44, tall = 30, last = Math.max(...now.map(row => row.end))
    const most = head * block * (block + 1) / 2 / worker + block   // the latest end that any order can have
    const x = t => left + t / Math.max(most, last) * (width - left - 2)
    chart.setAttribute('height', tall * now.length + 22)
    chart.replaceChildren(...now.flatMap(({ programs, end }, i) => [
      s('text', { x: 0, y: tall * i + 20 }, `SM ${i}`),
      ...programs.flatMap(p => {
        const wide = x(p.start + p.block + 1) - x(p.start)
        const bar = s('rect', { x: x(p.start) + 1, y: tall * i + 3, width: Math.max(wide - 2, 1), height: tall - 6, rx: 3, class: 'program',
          style: `--paint: ${paints[1 + p.head % 5]}` })
        return wide < 15 ? [bar] : [bar, s('text', { x: x(p.start) + wide / 2, y: tall * i + 20, 'text-anchor': 'middle' }, p.block + 1)]
      }),
    ]),
    s('path', { d: `M${x(last)} 0V${tall * now.length}`, class: 'end' }),
    s('text', { x: x(last), y: tall * now.length + 16, 'text-anchor': 'end' }, 'all done'))
  }
  const draw = () => {
    now = schedule()
    const last = Math.max(...now.map(row => row.end)), share = head * block * (block + 1) / 2 / worker
    show(end, last, whole), show(even, share), show(busy, share / last, x => percent(x))
    reading.replaceChildren(h('strong', {}, names[order]), `: ${head * block} programs on ${worker} multiprocessors are done after ${last} steps; `,
      `shared out evenly it would be ${kit.short(share)}.`)
    sliders.forEach(({ set }) => set())
    picks.forEach((pick, i) => { pick.input.checked = i === order })
    place()
  }
  const slider = (name, label, choices, get, put, says) => {
    const control = kit.slider({ name, label, choices, format: kit.tick, onchange: x => { put(x), draw() } })
    return { node: control.node, set: () => control.set(get(), `${get()} ${says}`) }
  }
  const sliders = [
    slider('block', 'Blocks of queries', data.blocks, () => block, x => { block = x }, 'blocks of queries'),
    slider('head', 'Heads', data.heads, () => head, x => { head = x }, 'heads'),
    slider('worker', 'Multiprocessors', data.workers, () => worker, x => { worker = x }, 'multiprocessors'),
  ]
  const picks = names.map((name, i) => kit.pick('order', () => { order = i; draw() }, name))

  root.append(
    h('style', {}, `
      .controls { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 0 28px }
      .orders { display: flex; flex-wrap: wrap; gap: 4px 8px; margin: 4px 0 8px } .orders .pick span { padding: 6px 10px }
      .reading { margin: 6px 0 10px; min-height: 4.2em }
      .program { fill: var(--paint); fill-opacity: .35; stroke: var(--paint); stroke-width: 1.5; forced-color-adjust: none; print-color-adjust: exact }
      .end { stroke: currentColor; stroke-width: 1.5; stroke-dasharray: 4 3 }
      @container (min-width: 620px) { .reading { min-height: 1.4em } }`),
    h('div', { class: 'controls' }, ...sliders.map(slider => slider.node)),
    h('fieldset', { class: 'orders', 'aria-label': 'Order of the programs' }, ...picks.map(pick => pick.node)),
    reading,
    h('p', { class: 'note' }, 'A bar is a program: as long as its number of tiles, which stands in it. A colour is a head.'),
    chart,
    h('table', {}, h('tbody', {},
      h('tr', {}, h('th', { scope: 'row' }, 'steps until all are done'), number(end)),
      h('tr', {}, h('th', { scope: 'row' }, 'steps, if shared out evenly'), number(even)),
      h('tr', {}, h('th', { scope: 'row' }, 'of the time, a multiprocessor works'), number(busy)))))
  draw()
  new ResizeObserver(place).observe(chart)
}
