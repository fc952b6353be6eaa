/* The kit that all interactive figures share. The Python wrapper pastes it and one figure into one inline script:
 *
 *   (function () { <kit.js> ; <figure.js> ; kit.mount(document.getElementById('fig-NAME'), FIGURE, DATA) })()
 *
 * so this file defines `const kit`, each figure file `const FIGURE = (kit, root, data) => {...}`, and nothing leaks
 * into the page. `mount` fills the figure's `.ac-mount`, whose fallback text stays where scripts do not run. No figure
 * loads anything, and no file here may contain a closing script tag.
 *
 * A figure cannot know its page: a light or dark book, Colab, Jupyter. So text is `currentColor` on a transparent
 * ground and never on paint, paints have a contrast of at least 3:1 on white and on #14181e, and a shadow root keeps
 * the page's styles out and ours in (open, so that tests can look inside). */
const kit = (() => {
  // The course's palette, grey first. Colour never stands alone: everything painted is also named or numbered.
  const paints = ['#7f8790', '#3a86d6', '#22997a', '#d9770f', '#b267c9', '#e0533d']

  const css = `
    .ac { container-type: inline-size; padding: 4px; text-align: start; line-height: 1.4 }
    * { box-sizing: border-box }
    p { margin: 0 }
    [hidden] { display: none !important }
    fieldset { min-width: 0; margin: 0; padding: 0; border: 0 }
    .head { padding: 0; font-weight: 600 }
    small { display: block; font-size: .85em; font-weight: 400 }
    table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums }
    th, td { height: 32px; padding: 2px 10px 2px 0; text-align: start; font-weight: 400 }
    th:last-child, td:last-child { padding-right: 0 }
    thead th { vertical-align: bottom; font-weight: 600 }
    tbody tr { border-top: 1px solid #7f879055 }
    .number { width: 1%; text-align: end; white-space: nowrap }
    .note { font-size: .92em }
    .error { padding: 8px 12px; border: 2px solid #d9770f }

    button { min-height: 40px; padding: 0 12px; border: 2px solid #7f8790; border-radius: 8px; background: none;
      font: inherit; color: inherit; cursor: pointer }
    button:hover { background: #7f879022 }
    button[aria-pressed=true] { border-color: currentColor; background: #7f879033 }
    :focus-visible { outline: 3px solid #3a86d6; outline-offset: 1px }
    .row { display: flex; flex-wrap: wrap; gap: 8px }
    .spoken { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap }

    .pick { position: relative; display: block; cursor: pointer }
    .pick input { position: absolute; inset: 0; width: 100%; height: 100%; margin: 0; z-index: 1; opacity: 0;
      cursor: pointer }
    .pick input + * { display: block; border: 2px solid #0000; border-radius: 8px }
    .pick:hover input + * { background: #7f879022 }
    .pick input:checked + * { border-color: currentColor; background: #7f879033 }
    .pick input:focus-visible + * { outline: 3px solid #3a86d6; outline-offset: 1px }

    .bar { position: relative; display: block; height: 14px; min-width: 16px; border-radius: 3px; background: #7f879026 }
    .bar i { position: absolute; top: 0; bottom: 0; border-radius: 2px }
    .bar b { position: absolute; top: -3px; bottom: -3px; z-index: 1; width: 1px; background: currentColor }
    .paint { background: var(--paint); forced-color-adjust: none; print-color-adjust: exact }
    .hatch { background: repeating-linear-gradient(120deg, var(--paint) 0 4px, #0000 4px 6px) }

    .slider { display: grid; grid-template-columns: 1fr auto; align-items: baseline }
    .slider output { font-variant-numeric: tabular-nums }
    .slider input { grid-column: 1 / 3; appearance: none; width: 100%; height: 40px; margin: 0; background: none;
      cursor: pointer }
    input::-webkit-slider-runnable-track { height: 4px; border-radius: 2px; background: #7f8790 }
    input::-moz-range-track { height: 4px; border-radius: 2px; background: #7f8790 }
    input::-webkit-slider-thumb { appearance: none; width: 22px; height: 22px; margin-top: -9px; border-radius: 50%;
      background: #3a86d6 }
    input::-moz-range-thumb { width: 22px; height: 22px; border: 0; border-radius: 50%; background: #3a86d6 }

    svg { display: block; width: 100%; overflow: visible; font-size: 13px }
    svg text { fill: currentColor }
    @container (max-width: 720px) { table { font-size: .92em } th, td { padding-right: 6px } }
    @media (prefers-reduced-motion: no-preference) { .bar i { transition: left .2s, width .2s } }`

  const build = (node, attributes, children) => {
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith('on')) node.addEventListener(name.slice(2), value)
      else node.setAttribute(name, value)
    }
    node.append(...children)   // strings become text nodes: a token from the data can never become markup
    return node
  }
  const h = (tag, attributes = {}, ...children) => build(document.createElement(tag), attributes, children)
  const s = (tag, attributes = {}, ...children) =>
    build(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children)
  // Headers of columns and rows, cells with a number. A column header with a note spans a bar and its number.
  const col = (title, note) => note ? h('th', { scope: 'col', colspan: 2 }, title, h('small', {}, note))
    : h('th', { scope: 'col', class: 'number' }, title)
  const tr = (title, ...cells) => h('tr', {}, h('th', { scope: 'row' }, title), ...cells)
  const number = (...content) => h('td', { class: 'number' }, ...content)
  const table = (columns, rows) => h('table', {}, h('thead', {}, h('tr', {}, ...columns)), h('tbody', {}, ...rows))

  const fixed = (x, digits = 2) => {
    const text = Math.abs(x).toFixed(digits)
    return x < 0 && Number(text) !== 0 ? '\u2212' + text : text   // a real minus sign, and never "-0.00"
  }
  const short = x => {   // at least two digits that count, down to a millionth
    const size = Math.abs(x)
    return fixed(x, size >= 100 ? 0 : size > 0 && size < 0.1 ? Math.min(1 - Math.floor(Math.log10(size)), 6) : 2)
  }
  const percent = (x, digits = 0) => {
    const unit = 10 ** -digits, y = 100 * x   // rare is not never, and almost all is not all
    return (y > 0 && y < unit / 2 ? `<${unit}` : x < 1 && y > 100 - unit / 2 ? `>${100 - unit}` : fixed(y, digits)) + '\u00a0%'
  }

  const sum = xs => xs.reduce((a, b) => a + b, 0)
  const dot = (a, b) => sum(a.map((x, d) => x * b[d]))
  const softmax = scores => {
    const top = Math.max(...scores)   // exp of a large score would overflow; the shift changes no ratio
    const parts = scores.map(x => Math.exp(x - top)), total = sum(parts)
    return parts.map(x => x / total)
  }
  const entropy = weights => sum(weights.map(w => w > 0 ? -w * Math.log(w) : 0))   // nats; 0 ln 0 = 0

  // A shown number. What the reader sees is rounded, so `data-exact` holds the number itself, for tests.
  // <output> is a live region by default; with dozens changing at once, each figure speaks by one sentence instead.
  const value = name => h('output', { 'data-value': name, 'aria-live': 'off' })
  const show = (output, x, format = fixed) => {
    output.setAttribute('data-exact', x)
    output.textContent = format(x)
  }

  // Where a token looks, for a sentence: at most four others of 5 % or more, the rest in one lump.
  const looks = (weights, tokens, query, alike = 'all words alike') => {
    const ranked = weights.map((_, i) => i).sort((a, b) => weights[b] - weights[a])
    if (weights.length > 1 && weights[ranked[0]] - weights[ranked.at(-1)] < 1e-6) return [alike]
    let top = ranked.filter((i, n) => n === 0 || n < 4 && weights[i] >= 0.05)
    if (top.length >= ranked.length - 1) top = ranked
    const said = top.flatMap((i, n) =>
      [n ? ', ' : '', h('strong', {}, i === query ? 'itself' : tokens[i]), `\u00a0${percent(weights[i])}`])
    return top === ranked ? said : [...said, `, the rest ${percent(1 - sum(top.map(i => weights[i])))}`]
  }

  const need = (ok, message) => { if (!ok) throw new Error(message) }
  const numbers = (xs, name, n) => {
    need(Array.isArray(xs) && xs.length > 0 && xs.every(Number.isFinite), `“${name}” must be a list of finite numbers`)
    need(n === undefined || xs.length === n, `“${name}” holds ${xs.length} numbers, but needs ${n}`)
  }

  // The paint of the i-th thing; past the sixth, the hues come again, hatched.
  const painted = i => h('i', { class: i < paints.length ? 'paint' : 'paint hatch',
    style: `--paint: ${paints[i % paints.length]}` })
  // A table cell with a bar from lo to hi, a piece per paint, and a line at zero where both signs occur. Decoration:
  // the number stands beside it.
  const bar = (lo, hi, ...is) => {
    const at = x => 100 * (x - lo) / ((hi - lo) || 1)
    const pieces = is.map(painted), zero = h('b', { style: `left: ${at(0)}%` })
    return {
      pieces,
      cell: h('td', {}, h('span', { class: 'bar', 'aria-hidden': 'true' }, ...pieces, lo < 0 && hi > 0 ? zero : '')),
      set: (to, from = 0, piece = pieces[0]) => {
        const [a, b] = [at(from), at(to)].sort((a, b) => a - b)
        piece.style.left = `${a}%`
        piece.style.width = `${b - a}%`
      },
    }
  }

  // Round numbers from lo to hi, about n of them, and how they read on an axis.
  const ticks = (lo, hi, n) => {
    const raw = (hi - lo) / n, ten = 10 ** Math.floor(Math.log10(raw))
    const step = ten * [1, 2, 5, 10].find(m => m * ten >= raw * 0.999), start = Math.ceil(lo / step - 1e-9)
    return Array.from({ length: Math.floor(hi / step + 1e-9) - start + 1 }, (_, i) => (start + i) * step)
  }
  const tick = t => String(Number(t.toPrecision(6))).replace('-', '\u2212')

  // A radio button that looks like what it contains.
  const pick = (group, onchange, ...content) => {
    const input = h('input', { type: 'radio', name: group, onchange })
    return { input, node: h('label', { class: 'pick' }, input, h('span', {}, ...content)) }
  }

  // A labelled range input. It moves through `choices`, or from min to max in 200 steps, so that arrow keys and Page
  // Up/Down are useful; `set` can put any value in between. `valuetext` is what a screen reader says.
  const slider = ({ name, label, min, max, log = false, choices, format = short, onchange }) => {
    const steps = choices ? choices.length - 1 : 200
    const map = p => choices ? choices[p] : p === 0 ? min : p === steps ? max
      : log ? min * (max / min) ** (p / steps) : min + (max - min) * p / steps
    const unmap = x => choices ? choices.indexOf(x)
      : Math.round(steps * (log ? Math.log(x / min) / Math.log(max / min) : (x - min) / (max - min)))
    const input = h('input', { type: 'range', id: `slider-${name}`, max: steps,
      oninput: () => onchange(map(Number(input.value))) })
    const output = value(name)
    return {
      node: h('div', { class: 'slider' }, h('label', { for: input.id, class: 'head' }, ...[label].flat()), output, input),
      set: (x, valuetext) => {
        input.value = unmap(x)
        input.setAttribute('aria-valuetext', valuetext)
        show(output, x, format)
      },
    }
  }
  // The slider for a temperature in [data.min, data.max], with buttons for its ends and for 1.
  const temperature = ({ min, max, temperature }, [cold, hot], onchange) => {
    numbers([min, max, temperature], 'min, max and temperature')
    need(0 < min && min <= temperature && temperature <= max && min < max, '“temperature” must lie in 0 < min…max')
    const control = slider({ name: 'temperature', label: 'Temperature T', min, max, log: true, onchange })
    const buttons = [[cold, min], ['T = 1', 1], [hot, max]].filter(([, T]) => min <= T && T <= max)
      .map(([label, T]) => ({ T, node: h('button', { type: 'button', onclick: () => onchange(T) }, label) }))
    return {
      node: control.node,
      presets: h('div', { class: 'row' }, ...buttons.map(b => b.node)),
      set: (now, effect) => {
        buttons.forEach(b => b.node.setAttribute('aria-pressed', b.T === now))
        control.set(now, `T = ${short(now)}, ${effect}`)
      },
    }
  }

  const mount = (figure, FIGURE, data) => {
    // The same figure twice on a page has the same id twice, and getElementById finds only the first; the figure that
    // a script belongs to stands just before it.
    const before = document.currentScript?.previousElementSibling
    if (before?.matches('figure.ac-figure')) figure = before
    const host = figure.querySelector('.ac-mount')
    const root = host.shadowRoot ?? host.attachShadow({ mode: 'open' })
    const box = h('div', { class: 'ac' })
    root.replaceChildren(h('style', {}, css), box)
    // Keys that steer a control must not also turn the page (Sphinx) or move between cells (Jupyter).
    host.setAttribute('data-lm-suppress-shortcuts', 'true')
    host.onkeydown = event => {
      if (/^(Arrow|Home|End|Page|Enter| )/.test(event.key)) event.stopPropagation()
    }
    try {
      FIGURE(kit, box, data)
    } catch (error) {
      box.replaceChildren(h('p', { class: 'error', role: 'alert' }, `This figure cannot be drawn: ${error.message}.`))
    }
  }

  const kit = { bar, col, dot, entropy, fixed, h, looks, mount, need, number, numbers, painted, paints, percent, pick, s,
    short, show, slider, softmax, sum, table, temperature, tick, ticks, tr, value }
  return kit
})()
