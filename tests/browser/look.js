/* What the tests ask of a page, in one go: facts, not judgements. Runs in the page (conftest.py). */
(() => {
  const parent = node => node.assignedSlot ?? node.parentElement ?? (node.getRootNode().host ?? null)
  const describe = node => {
    const id = node.id ? `#${node.id}` : ''
    const classes = [...node.classList].slice(0, 3).map(c => `.${c}`).join('')
    return `<${node.localName}${id}${classes}> ${JSON.stringify((node.textContent ?? '').trim().slice(0, 40))}`
  }
  // All elements, those in shadow roots too.
  const everything = root => [...root.querySelectorAll('*')].flatMap(
    node => node.shadowRoot ? [node, ...everything(node.shadowRoot)] : [node])
  const within = (node, selector) => {
    for (let at = node; at; at = parent(at)) if (at.matches(selector)) return true
    return false
  }

  // ---- colours: what is painted, with what lies below ----
  const brush = Object.assign(document.createElement('canvas'), { width: 1, height: 1 })
    .getContext('2d', { willReadFrequently: true })
  const known = new Map()
  const rgba = colour => {   // the canvas understands every notation that a computed style may use
    if (!known.has(colour)) {
      brush.clearRect(0, 0, 1, 1)
      brush.fillStyle = colour
      brush.fillRect(0, 0, 1, 1)
      const [r, g, b, a] = brush.getImageData(0, 0, 1, 1).data
      known.set(colour, [r, g, b, a / 255])
    }
    return known.get(colour)
  }
  const over = ([r, g, b, a], below) => [r, g, b].map((x, i) => x * a + below[i] * (1 - a))
  const ground = node => {   // the colour behind an element's text
    const layers = []
    for (let at = node; at; at = parent(at)) layers.push(rgba(getComputedStyle(at).backgroundColor))
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255])
  }
  const luminance = colour => {
    const [r, g, b] = colour.map(x => x / 255).map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
  }
  const contrast = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y)
    return (high + 0.05) / (low + 0.05)
  }
  const faded = (paint, style, more = 1) => {
    const [r, g, b, a] = rgba(paint)
    return [r, g, b, a * Number(style.opacity) * more]
  }
  const SHAPES = 'path, rect, circle, ellipse, polygon, use'
  const painted = text => {   // the colour behind a text in a drawing: the page, and the shapes under the text's middle
    const box = text.getBoundingClientRect(), x = box.left + box.width / 2, y = box.top + box.height / 2
    const shapes = text.getRootNode().elementsFromPoint(x, y).filter(e => e.ownerSVGElement && e.matches(SHAPES))
    return shapes.reverse().reduce((below, shape) => {
      const style = getComputedStyle(shape)
      return style.fill === 'none' ? below : over(faded(style.fill, style, Number(style.fillOpacity)), below)
    }, ground(text.ownerSVGElement))
  }
  const faint = () => {   // text in figures and code whose contrast is below 4.5 (3 where it is large), and the page's count
    const found = [], seen = new Map()
    let count = 0
    const holds = node => [...node.childNodes].some(n => n.nodeType === Node.TEXT_NODE && n.textContent.trim())
    for (const node of everything(document.body)) {
      if (!holds(node) || ['style', 'script', 'title', 'desc'].includes(node.localName)) continue
      const figure = within(node, '.ac-figure')
      if (!figure && !node.closest('pre')) continue
      const box = node.getBoundingClientRect()
      if (!box.width || !box.height || !node.checkVisibility({ visibilityProperty: true })) continue
      count += 1
      const style = getComputedStyle(node), drawn = node.localName === 'text' || node.localName === 'tspan'
      let ratio
      if (drawn) {
        if (box.top < 0 || box.bottom > innerHeight) node.scrollIntoView({ block: 'center', behavior: 'instant' })
        const behind = painted(node)
        ratio = contrast(over(faded(style.fill, style, Number(style.fillOpacity)), behind), behind)
      } else {
        const key = figure ? node : `${style.color} ${style.fontWeight} ${style.fontSize} ${node.closest('pre').parentElement.className}`
        if (!seen.has(key)) {
          const behind = ground(node)
          seen.set(key, contrast(over(faded(style.color, style), behind), behind))
        }
        ratio = seen.get(key)
      }
      const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700)
      if (ratio < (large ? 3 : 4.5)) found.push(`${ratio.toFixed(2)} : 1 for ${describe(node)}`)
    }
    scrollTo(0, 0)
    return { count, found }
  }

  // ---- text that nobody should see ----
  const article = document.querySelector('article') ?? document.querySelector('main') ?? document.body
  const raw = () => {
    const found = []
    const walker = document.createTreeWalker(article, NodeFilter.SHOW_TEXT)
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      const at = node.parentElement
      if (at.closest('script, style, mjx-container')) continue
      const code = at.closest('pre, code')
      const patterns = code ? [/^\s*#\s?\|/m, /^# @title/m]
        : [/#\|/, /\{\{/, /:::/, /```/, /\$[^\s$][^$]*\$/, /\\[([]/, /\\[a-zA-Z]+\{/, /\*\*\w/]
      for (const pattern of patterns) {
        const hit = node.textContent.match(pattern)
        if (hit) found.push(node.textContent.slice(Math.max(0, hit.index - 20), hit.index + 40))
      }
    }
    return found
  }

  // ---- width ----
  const sideways = () => {
    const page = document.documentElement, wide = []
    if (page.scrollWidth > page.clientWidth) {   // who sticks out, without a box around it that scrolls?
      const scrolls = node => node && (['auto', 'scroll', 'hidden', 'clip'].includes(getComputedStyle(node).overflowX) || scrolls(parent(node)))
      for (const node of everything(document.body)) {
        if (node.getBoundingClientRect().right > page.clientWidth + 1 && !scrolls(parent(node))) wide.push(describe(node))
      }
    }
    return { scroll: page.scrollWidth, client: page.clientWidth, wide: wide.slice(0, 5) }
  }

  const image = node => ({
    src: node.currentSrc || node.src, alt: node.getAttribute('alt'), loaded: node.complete && node.naturalWidth > 0,
    where: within(node, '.navbar-brand') ? 'logo' : within(node, '.btn__icon-container') ? 'button' : 'page',
  })
  // What has to be described: drawings, and the course's figures (by a label of their own or on the drawing inside).
  const label = node => (node.getAttribute('aria-label') ?? node.querySelector('svg[role=img], img')?.getAttribute('aria-label') ?? '').trim()
  const pictures = () => everything(article)
    .filter(node => node.matches('.ac-figure, svg[role=img], [role=img]:not(img)') && !within(node, '[aria-hidden=true]'))
    .map(node => ({ what: describe(node).slice(0, 60), label: label(node) }))
  const behind = () => [...document.querySelectorAll('.ac-figure')]
    .map(node => ({ id: node.id || label(node).slice(0, 40), ground: ground(node).map(Math.round) }))

  const named = control => control.getAttribute('aria-label') || [...(control.labels ?? [])].map(l => l.textContent).join(' ') || control.textContent
  const interactive = () => [...document.querySelectorAll('.ac-mount')].filter(mount => mount.shadowRoot).map(mount => {
    const figure = mount.closest('figure')
    return {
      id: figure.id, role: figure.getAttribute('role'), label: label(figure),
      caption: figure.querySelector('figcaption')?.textContent.trim() ?? '', focused: mount.shadowRoot.activeElement !== null,
      controls: [...mount.shadowRoot.querySelectorAll('button, input, select')].map(c => named(c).trim()),
    }
  })

  return {
    sideways,
    facts: () => ({
      title: document.title,
      text: article.textContent.length,
      formulas: document.querySelectorAll('mjx-container').length,
      unrendered: [...document.querySelectorAll('.math')].filter(m => !m.querySelector('mjx-container')).map(describe),
      broken: [...document.querySelectorAll('mjx-merror, [data-mjx-error]')].map(m => m.getAttribute('data-mjx-error') ?? m.textContent),
      images: [...document.images].map(image),
      pictures: pictures(),
      raw: raw(),
      sideways: sideways(),
      faint: faint(),
      behind: behind(),
      paper: ground(document.body).map(Math.round),
      theme: document.documentElement.dataset.theme,
      previous: document.querySelector('.prev-next-area a.left-prev')?.getAttribute('href') ?? null,
      next: document.querySelector('.prev-next-area a.right-next')?.getAttribute('href') ?? null,
      icon: document.querySelector('link[rel~=icon]')?.href ?? null,
      card: document.querySelector('meta[property="og:image"]')?.content ?? null,
      colab: [...document.querySelectorAll('a[href*="colab.research.google.com"]')].map(a => a.href),
      cells: document.querySelectorAll('div.cell_input pre').length,
      copy: document.querySelectorAll('div.cell_input button.copybtn').length,
      interactive: interactive(),
      unmounted: [...document.querySelectorAll('.ac-mount')].filter(m => !m.shadowRoot || m.shadowRoot.querySelector('[role=alert]')).map(m => m.shadowRoot?.textContent.slice(0, 200) ?? 'not drawn'),
    }),
  }
})()
