/* A softmax that reads its row in blocks. data: {scores, values, blocks, block, step}: `blocks` are the sizes that can be
 * chosen, `block` the first of them to be shown, `step` how many blocks are read at the start. Kept are the largest
 * score so far, the sum of e^(score − largest), and that sum weighted with the values. */
const FIGURE = (kit, root, data) => {
  const { h, value, show, need, number } = kit
  const { scores, values, blocks } = data, n = scores?.length
  kit.numbers(scores, 'scores')
  kit.numbers(values, 'values', n)
  need(n <= 12, `${n} scores are more than the twelve that fit on a phone`)
  kit.numbers(blocks, 'blocks')
  need(blocks.every((x, i) => Number.isInteger(x) && x > (blocks[i - 1] ?? 0)), '“blocks” must be whole numbers that rise')
  let { block, step } = data
  need(blocks.includes(block), '“block” must be one of the blocks')
  const steps = () => Math.ceil(n / block)
  need(Number.isInteger(step) && 0 < step && step <= steps(), `“step” must be a whole number from 1 to ${steps()}`)

  const state = count => {   // after `count` blocks, one after the other, as the library does it
    let now = { top: -Infinity, rescale: 0, total: 0, summed: 0, before: -Infinity }
    for (let b = 0; b < count; b++) {
      const read = scores.slice(b * block, (b + 1) * block), top = Math.max(now.top, ...read)
      const parts = read.map(x => Math.exp(x - top)), rescale = Math.exp(now.top - top)
      now = { before: now.top, top, rescale, total: now.total * rescale + kit.sum(parts),
        summed: now.summed * rescale + kit.dot(parts, values.slice(b * block, (b + 1) * block)) }
    }
    return now
  }

  const rows = scores.map((score, i) => {
    const part = value(`part-${i}`), bar = kit.bar(0, 1, 1), when = h('span', { class: 'when' })
    return { part, bar, when, node: kit.tr(kit.fixed(score, 1), number(kit.tick(values[i])), bar.cell, number(part, when)) }
  })
  const top = value('top'), rescale = value('rescale'), total = value('total'), summed = value('summed'), average = value('average')
  const reading = h('p', { class: 'reading', 'data-value': 'reading', 'aria-live': 'polite' })

  const draw = () => {
    const now = state(step), read = Math.min(step * block, n), start = (step - 1) * block
    rows.forEach(({ part, bar, when, node }, i) => {
      const seen = i < read
      show(part, seen ? Math.exp(scores[i] - now.top) : 0)
      part.hidden = !seen
      bar.set(seen ? Math.exp(scores[i] - now.top) : 0)
      bar.pieces[0].classList.toggle('hatch', seen && i < start)
      when.textContent = seen ? '' : 'not read yet'
      node.classList.toggle('first', i % block === 0 && i > 0)
      node.classList.toggle('now', seen && i >= start)
    })
    show(top, now.top), show(rescale, now.rescale), show(total, now.total), show(summed, now.summed)
    show(average, now.summed / now.total)
    const grown = now.top > now.before
    reading.replaceChildren(`Block ${step} of ${steps()}: `, ...(step === 1 ? ['nothing was summed before it.']
      : grown ? ['the largest score grew, so all that was summed is multiplied by ', h('strong', {}, kit.short(now.rescale)), '.']
        : ['the largest score stays, so nothing shrinks.']),
      read === n ? ' All is read: the average is exact.' : '')
    stepSlider.set(step, `${step} of ${steps()} blocks, ${read} of ${n} scores read`)
    blockSlider.set(block, `${block} ${block === 1 ? 'score' : 'scores'} per block`)
    back.disabled = step === 1, next.disabled = step === steps()
  }

  const go = to => { step = Math.max(1, Math.min(steps(), to)); draw() }
  const makeSteps = () => kit.slider({ name: 'step', label: 'Blocks read', choices: Array.from({ length: steps() }, (_, i) => i + 1),
    format: kit.tick, onchange: go })
  let stepSlider = makeSteps()
  const blockSlider = kit.slider({ name: 'block', label: 'Scores per block', choices: blocks, format: kit.tick, onchange: x => {
    block = x
    const fresh = makeSteps()
    stepSlider.node.replaceWith(fresh.node)
    stepSlider = fresh
    go(step)
  } })
  const back = h('button', { type: 'button', onclick: () => go(step - 1) }, 'One block back')
  const next = h('button', { type: 'button', onclick: () => go(step + 1) }, 'Next block')

  root.append(
    h('style', {}, `
      .controls { display: grid; gap: 0 32px } .row { margin: 4px 0 8px }
      .reading { margin: 8px 0 14px; min-height: 4.2em; font-size: 1.08em }
      button:disabled { color: inherit; border-style: dashed; cursor: default }
      .when { font-size: .85em } .first { border-top: 2px solid currentColor !important } .now th { font-weight: 700 }
      .state { margin-top: 14px } .state td, .state th { height: 30px }
      @container (min-width: 560px) { .controls { grid-template-columns: 1fr 1fr } .reading { min-height: 1.4em } }`),
    h('div', { class: 'controls' }, blockSlider.node, stepSlider.node),
    h('div', { class: 'row' }, back, next),
    reading,
    h('table', {}, h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, 'score s'), kit.col('value v'),
      h('th', { scope: 'col', colspan: 2 }, 'counts e^(s − largest)', h('small', {}, 'plain: this block, hatched: earlier ones')))),
    h('tbody', {}, ...rows.map(r => r.node))),
    h('table', { class: 'state' }, h('tbody', {},
      kit.tr('largest score so far, μ', number(top)), kit.tr('rescale, e^(old μ − μ)', number(rescale)),
      kit.tr('sum, ℓ', number(total)), kit.tr('weighted sum, a', number(summed)), kit.tr('average of the values, a / ℓ', number(average)))))
  draw()
}
