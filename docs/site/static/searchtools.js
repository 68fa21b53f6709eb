// The search of the site, in place of that of Sphinx: by sections and by names, without a request, so that it also works
// for files that are opened from a disk. docs/site/search.py makes the entries: [page, anchor, heading, name, text, also].
"use strict";

const Search = {
  shown: 40,

  setIndex(index) {
    Search.index = index;
    const query = new URLSearchParams(location.search).get("q") || "";
    for (const field of document.querySelectorAll("input[name=q]")) field.value = query;
    if (query.trim()) Search.show(query);
  },

  LITTLE: new Set("a an and are as at be by can do does for from how i if in is it my not of on or that the this to what when which with".split(" ")),

  // A word without its usual ending: change, changed and changes are found by each other.
  stem: (word) => (word.length < 5 ? word : word.replace(/(?:ing|ed|es|s|e)$/, (end) => (word.length - end.length < 3 ? end : ""))),

  words(text) {
    const all = text.toLowerCase().split(/[^\p{L}\p{N}]+/u).filter(Boolean), long = all.filter((word) => !Search.LITTLE.has(word));
    return (long.length ? long : all).map(Search.stem);
  },

  // How many of the patterns a text has, each at the beginning of a word.
  held: (text, patterns) => patterns.filter((pattern) => text.search(pattern) >= 0).length,

  // Guides first, then the reference of Python, then what is written for developers.
  place(page, named) {
    if (named && page === "docs/options.html") return 60;
    if (page === "README.html" || page.startsWith("docs/")) return 20;
    if (page.startsWith("api/")) return 10;
    return page.startsWith("deploy/") || page.startsWith("benchmarks/") ? 0 : -40;
  },

  find(query) {
    const { pages, entries } = Search.index, words = Search.words(query), name = query.trim().toLowerCase().replace(/^-+/, "").replace(/[\s-]+/g, "_");
    const patterns = words.map((word) => new RegExp(`(?<![\\p{L}\\p{N}])${word}`, "iu")), found = [];
    for (const [page, anchor, heading, named, text, also] of entries) {
      const [address, title] = pages[page], top = !heading && !named;
      if (!patterns.every((each) => each.test(named) || each.test(heading) || each.test(text) || each.test(title) || (also && each.test(also)))) continue;
      let score = Search.place(address, named);
      if (named) {
        const reference = /^(docs\/(options|commands)|api\/.*)\.html$/.test(address);
        const own = named.toLowerCase().replace(/^-+/, "").replace(/\s.*$/, "").replace(/-/g, "_"), last = own.split(".").pop();
        if (own === name) score += reference ? 400 : 150;
        else if (last === name) score += 150;
        else if (Search.held(own.replace(/_/g, " "), patterns) === words.length) score += reference ? 110 : 60;
        if (query.trim().startsWith("--") && named.startsWith("--")) score += 100;
      }
      if (heading) score += 60 * Search.held(heading, patterns) / Math.max(words.length, 0.6 * Search.words(heading).length) * (named ? 0.3 : 1);
      score += (top ? 100 : 12) * Search.held(title, patterns) / Math.max(words.length, 0.6 * Search.words(title).length);
      if (also && also.split(", ").some((each) => Search.words(each).join(" ") === words.join(" "))) score += 150;
      for (const pattern of patterns) score += 3 * Math.min(5, (text.match(new RegExp(pattern, "giu")) || []).length);
      if (words.length > 1 && text.toLowerCase().includes(query.trim().toLowerCase())) score += 15;
      found.push({ score, address, anchor, title, heading, name: named, text });
    }
    return { found: found.sort((a, b) => b.score - a.score), patterns };
  },

  // The part of a text around the first word that was found.
  part(text, patterns) {
    const at = Math.max(0, Math.min(...patterns.map((each) => { const place = text.search(each); return place < 0 ? Infinity : place; })));
    const from = Number.isFinite(at) && at > 90 ? text.indexOf(" ", at - 80) + 1 : 0;
    return (from ? "… " : "") + text.slice(from, from + 240) + (text.length > from + 240 ? " …" : "");
  },

  marked(text, patterns) {
    const nodes = [], every = new RegExp(patterns.map((each) => `${each.source}[\\p{L}\\p{N}]*`).join("|"), "giu");
    let last = 0;
    for (const hit of text.matchAll(every)) {
      const mark = document.createElement("mark");
      mark.textContent = hit[0];
      nodes.push(text.slice(last, hit.index), mark);
      last = hit.index + hit[0].length;
    }
    return [...nodes, text.slice(last)];
  },

  show(query) {
    const { found, patterns } = Search.find(query), box = document.getElementById("search-results");
    const element = (tag, kind, ...children) => { const made = document.createElement(tag); if (kind) made.className = kind; made.append(...children); return made; };
    const head = element("p", "search-summary", found.length ? `${found.length} ${found.length === 1 ? "place" : "places"} for “${query}”${found.length > Search.shown ? `, of which the best ${Search.shown} are shown` : ""}` : `Nothing was found for “${query}”. Try fewer or other words.`);
    const lines = found.slice(0, Search.shown).map(({ address, anchor, title, heading, name, text }) => {
      const link = element("a", "", name ? element("code", "", name) : heading || title);
      link.href = address + (anchor ? `#${anchor}` : "");
      const where = name || heading ? [" ", element("span", "search-page", [title, name ? heading : ""].filter(Boolean).join(" › "))] : [];
      return element("li", "", element("div", "", link, ...where), element("p", "", ...Search.marked(Search.part(text, patterns), patterns)));
    });
    box.replaceChildren(element("h1", "", "Search"), head, element("ul", "search", ...lines));
  },
};
