// What the browser is asked about a page: see test_browser.py.

// Whether the color scheme is the dark one, how wide the page is, and how many buttons are seen.
function seen() {
  return [
    matchMedia("(prefers-color-scheme: dark)").matches,
    document.documentElement.scrollWidth,
    [...document.querySelectorAll("button")].filter(one => one.checkVisibility()).length,
  ];
}

// Of the first screen, what lies below it.
function below() {
  return [...document.querySelectorAll("header.verdict, .GO ~ .cards #exports, .tile")]
  .map(one => [one.className || one.id, one.getBoundingClientRect().bottom])
  .filter(([name, bottom]) => bottom > innerHeight);
}

// What is wider than the screen.
function wider() {
  return [...document.querySelectorAll("body *")]
  .filter(one => one.getBoundingClientRect().right > innerWidth + 1)
  .filter(one => !one.closest("nav, .scroll, .skip"))
  .map(one => one.outerHTML.slice(0, 80));
}

// Text whose contrast with its ground is too small.
function faint(least) {
  const channels = text => (text.match(/[\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const grounds = one => {
    for (; one; one = one.parentElement) {
      const style = getComputedStyle(one);
      if (style.backgroundImage !== "none")
        return [...style.backgroundImage.matchAll(/rgba?\(([^)]*)\)/g)].map(m => channels(m[1]));
      const color = channels(style.backgroundColor);
      if (color.length === 3) return [color];
    }
    return [[255, 255, 255]];
  };
  const found = new Set();
  for (const one of document.querySelectorAll("body *")) {
    const speaks = [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!speaks || one.closest("script, style, title, desc")) continue;
    const style = getComputedStyle(one);
    const ink = light(channels(one.closest("svg") ? style.fill : style.color));
    for (const ground of grounds(one).filter(color => color.length === 3)) {
      const [low, high] = [ink, light(ground)].sort((a, b) => a - b);
      const ratio = (high + 0.05) / (low + 0.05);
      if (ratio < least) found.add(`${one.tagName}.${one.className}: ${ratio.toFixed(2)}`);
    }
  }
  return [...found];
}

// What a reader who does not see the page would miss: names, landmarks, headings in order, links
// that lead somewhere.
function faults() {
  const all = query => [...document.querySelectorAll(query)];
  const levels = all("h1, h2, h3, h4").map(one => Number(one.tagName[1]));
  return [
    ...all("nav, section, figure").filter(one => !one.ariaLabel && !one.getAttribute("aria-labelledby"))
      .map(one => `${one.tagName} ${one.id} has no name`),
    ...all("svg").filter(one => one.firstElementChild.tagName !== "title").map(() => "an svg has no title"),
    ...all("a[href^='#']").filter(one => !document.getElementById(one.hash.slice(1)))
      .map(one => `${one.hash} leads nowhere`),
    ...["nav", "main", "header", "footer"].filter(name => !document.querySelector(name))
      .map(name => `no ${name}`),
    ...levels.filter((level, at) => (at === 0) !== (level === 1) || level > levels[at - 1] + 1)
      .map(level => `heading ${level} of ${levels}`),
  ];
}
