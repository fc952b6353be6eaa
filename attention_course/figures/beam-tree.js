/* A beam search, step by step, on a table of probabilities. data: {tokens, end, start, table, beam, alpha, max_len, step};
 * table["a b"] holds the probability of each token that may follow "a b", table[""] of those that come first; `tokens`
 * orders them, for ties; `start` is what stands before. A score is log-probability / n^alpha, n counts the end token. */
const FIGURE = (kit, root, data) => {
  const { h, s, value, show, need, fixed, paints } = kit
  const { tokens, end, start, table, max_len: longest } = data
  let { beam = 1, alpha = 0, step = 0 } = data
  const within = (x, low, high, name) =>
    need(Number.isInteger(x) && low <= x && x <= high, `“${name}” must be a whole number from ${low} to ${high}`)
  need(Array.isArray(tokens) && tokens.includes(end), '“tokens” must be a list that holds the “end”')
  within(longest, 1, 5, 'max_len'), within(beam, 1, 4, 'beam'), within(step, 0, longest, 'step')
  const alphas = Array.from({ length: 21 }, (_, i) => i / 10)
  need(alphas.includes(alpha), '“alpha” must be one of 0, 0.1, …, 2')

  // ---- the tree: all that the table allows; a leaf takes a row ----
  const nodes = []
  let leaves = 0
  const grow = (path, p, parent) => {
    const text = path.join(' '), first = leaves
    const node = { id: nodes.length, p, parent, n: path.length, token: path.at(-1), text, ended: path.at(-1) === end, next: [] }
    nodes.push(node)
    if (!node.ended && node.n < longest) {
      const row = table?.[text]
      need(row, `“table” has no row for “${text}”`)
      for (const token of Object.keys(row)) need(tokens.includes(token), `“${token}”, after “${text}”, is not in “tokens”`)
      kit.numbers(Object.values(row), `table["${text}"]`)
      need(Object.values(row).every(p => p >= 0) && Math.abs(kit.sum(Object.values(row)) - 1) < 1e-6, `the probabilities after “${text}” must sum to 1`)
      node.next = tokens.filter(token => row[token] > 0).map(token => grow([...path, token], row[token], node))
    }
    if (!node.next.length) leaves += 1
    node.middle = (first + leaves) / 2
    return node
  }
  const origin = grow([]), drawn = nodes.slice(1)
  need(leaves <= 10, `${leaves} ways to go on are more than the ten that fit`)

  // ---- the search ----
  // What is known after `steps` steps: for each node reached its log-probability and what became of it.
  const search = steps => {
    const logp = new Map([[origin, 0]]), fate = new Map(), score = new Map()
    const finish = node => { fate.set(node, 'finished'), score.set(node, logp.get(node) / node.n ** alpha) }
    let live = [origin], n = 0, best, bound, tried = [], why = ''
    while (n < steps && !why) {
      n += 1
      tried = live.flatMap(from => from.next.map(node => {
        logp.set(node, logp.get(from) + Math.log(node.p))
        return node
      })).sort((a, b) => logp.get(b) - logp.get(a))   // stable: ties stay in order
      tried.forEach((node, rank) => { fate.set(node, rank < beam ? 'live' : 'cut') })
      const kept = tried.slice(0, beam)
      kept.filter(node => node.ended).forEach(finish)
      live = kept.filter(node => !node.ended)
      if (n === longest) live.forEach(finish)
      for (const node of kept) if (score.has(node) && !(score.get(node) <= score.get(best))) best = node
      bound = live.length && n < longest ? Math.max(...live.map(node => logp.get(node))) / longest ** alpha : undefined
      why = n === longest ? `${longest} tokens are the limit` : !live.length ? 'nothing is live'
        : best && score.get(best) >= bound ? 'no live one can score higher' : ''
    }
    return { n, logp, fate, score, best, bound, tried, why }
  }

  // ---- what is shown ----
  const boxes = drawn.map(node => {
    const p = value(`p-${node.id}`), logp = value(`logp-${node.id}`), score = value(`score-${node.id}`), word = h('span')
    const numbers = h('div', { class: 'pair' }, h('span', {}, '×', p), h('span', {}, h('span', { class: 'spoken' }, ' log-probability '), logp))
    const state = h('div', {}, word, score)
    const box = h('div', {}, h('b', {}, node.token), numbers, state)
    return { node, p, logp, score, word, numbers, state, box }
  })
  const edges = s('svg', { 'aria-hidden': 'true' }), tree = h('div', { class: 'tree' }, edges, ...boxes.map(b => b.box))
  const heads = h('div', { class: 'heads' }, ...Array.from({ length: longest }, (_, i) => h('span', {}, `n = ${i + 1}`)))
  const reading = h('p', { class: 'reading', 'data-value': 'reading', 'aria-live': 'polite' })
  const best = value('best'), bound = value('bound'), chance = value('chance'), answer = h('strong', { 'data-value': 'answer' })
  const facts = {
    best: h('p', {}, 'Best finished score: ', best), bound: h('p', {}, 'Highest that a live one can still reach: ', bound),
    answer: h('p', {}, 'Answer: ', answer, ', probability ', chance),
  }
  let now
  const place = () => {   // boxes and edges, at their real size
    const width = tree.clientWidth || 600, narrow = width < 560, gap = narrow ? 9 : 36, row = narrow ? 86 : 72, column = width / longest
    tree.style.height = `${row * leaves}px`
    heads.style.cssText = `grid-template-columns: repeat(${longest}, ${column - gap}px); gap: ${gap}px; padding-left: ${gap}px`
    edges.setAttribute('height', row * leaves)
    boxes.forEach(({ node, box }) => {
      box.style.cssText = `left: ${(node.n - 1) * column + gap}px; width: ${column - gap}px; top: ${row * node.middle}px`
    })
    edges.replaceChildren(...drawn.map(node => {
      const x = (node.n - 1) * column, from = row * node.parent.middle, to = row * node.middle
      return s('path', { d: `M${x} ${from}C${x + gap / 2} ${from} ${x + gap / 2} ${to} ${x + gap} ${to}`, class: now.fate.get(node) ?? 'unseen' })
    }))
  }
  const draw = () => {
    now = search(step)
    boxes.forEach(({ node, p, logp, score, word, numbers, state, box }) => {
      const fate = now.fate.get(node), last = now.why && node === now.best
      box.className = `box ${fate ?? 'unseen'}${last ? ' answer' : ''}`
      numbers.hidden = state.hidden = !fate
      score.hidden = fate !== 'finished'
      if (!fate) return
      show(p, node.p), show(logp, now.logp.get(node))
      word.textContent = fate === 'finished' ? 'score ' : fate === 'live' && node.n < now.n ? 'kept' : fate
      if (fate === 'finished') show(score, now.score.get(node))
    })
    const quote = node => `“${node.text}”`, kept = now.tried.filter(node => now.fate.get(node) !== 'cut')
    reading.replaceChildren(...(!now.n ? [`Step 0: nothing follows “${start}” yet.`]
      : [now.n < step ? `The search ended after step ${now.n}: ` : `Step ${now.n}: `,
        `of ${now.tried.length} ways to go on, ${kept.length === now.tried.length ? 'all stay' : `the best ${kept.length} stay${kept.length > 1 ? '' : 's'}`}: `,
        ...kept.flatMap((node, i) => [i ? ', ' : '', h('strong', {}, quote(node)), node.ended ? ' (finished)' : '']), '. ',
        now.why ? `It ends here, for ${now.why}.` : '']))
    facts.best.hidden = !now.best, facts.bound.hidden = now.bound === undefined, facts.answer.hidden = !now.why
    if (now.best) show(best, now.score.get(now.best))
    if (now.bound !== undefined) show(bound, now.bound)
    if (now.why) {
      answer.textContent = [start, now.best.text.split(' ').filter(token => token !== end).join(' ')].join(' ')
      show(chance, Math.exp(now.logp.get(now.best)))
    }
    beamSlider.set(beam, beam === 1 ? 'a beam of 1: greedy' : `a beam of ${beam}`)
    alphaSlider.set(alpha, `alpha ${fixed(alpha, 1)}`)
    stepSlider.set(step, `step ${step} of ${longest}`)
    place()
  }
  const slider = (name, label, choices, format, onchange) => kit.slider({ name, label, choices, format, onchange: x => { onchange(x), draw() } })
  const beamSlider = slider('beam', 'Beam', [1, 2, 3, 4], kit.tick, x => { beam = x })
  const alphaSlider = slider('alpha', 'Penalty α', alphas, x => fixed(x, 1), x => { alpha = x })
  const stepSlider = slider('step', 'Step', Array.from({ length: longest + 1 }, (_, i) => i), kit.tick, x => { step = x })

  root.append(
    h('style', {}, `
      .sliders { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 0 24px }
      .reading { margin: 6px 0 10px; min-height: 5.6em } .facts { min-height: 4.4em; margin-top: 8px } .facts output { font-weight: 600 }
      .heads { display: grid; font-size: .85em } .tree { position: relative; margin-top: 4px; font-size: .92em; line-height: 1.3; font-variant-numeric: tabular-nums }
      svg { position: absolute; inset: 0 } path { fill: none; stroke: #7f8790; stroke-width: 2 }
      .box { position: absolute; transform: translateY(-50%); padding: 2px 6px; border: 2px solid #7f8790; border-radius: 8px }
      .box b { overflow-wrap: anywhere; font-weight: 600 } .pair { display: flex; flex-wrap: wrap; gap: 0 10px }
      .cut { border-style: dashed; stroke-dasharray: 5 4 } .unseen { border-color: #0000; stroke-width: 1; stroke-dasharray: 2 4 } .unseen b { font-weight: 400; opacity: .75 }
      .live { border-color: ${paints[1]}; stroke: ${paints[1]}; stroke-width: 3.5 }
      .finished { border: 4px double ${paints[2]}; stroke: ${paints[2]}; stroke-width: 3.5 } .answer { outline: 2px solid currentColor; outline-offset: 1px }
      .box.finished { padding: 0 4px }
      @container (max-width: 560px) { .tree { font-size: .75em; line-height: 1.2 } .box { padding: 1px 2px } .box.finished { padding: 0 } .pair { flex-direction: column } }
      @container (min-width: 560px) { .reading { min-height: 2.8em } }`),
    h('div', { class: 'sliders' }, beamSlider.node, stepSlider.node, alphaSlider.node),
    reading,
    h('p', { class: 'note' }, 'After ', h('strong', {}, `“${start}”`), '. A box: token, × probability, log-probability of all so far, what became of it.'),
    heads, tree, h('div', { class: 'facts' }, ...Object.values(facts)))
  draw()
  new ResizeObserver(place).observe(tree)
}
