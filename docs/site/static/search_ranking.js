// Ranks pages and sections by the rare words of the query that they contain. Sphinx itself lists only pages that
// contain every word, so that a question in a whole sentence finds nothing.
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;
  Search.performTermsSearch = (searchTerms, excludedTerms) => {
    const { terms, titleterms, titles, alltitles, docnames, filenames } = Search._index;
    const filesOf = (table, word) => (Object.hasOwn(table, word) ? [table[word]].flat() : []);
    const lengths = docnames.map(() => 0);
    Object.values(terms).forEach((files) => [files].flat().forEach((file) => (lengths[file] += 1)));
    const mean = lengths.reduce((sum, one) => sum + one, 0) / lengths.length;
    const scores = docnames.map(() => 0), matched = docnames.map(() => 0), weights = new Map();
    let total = 0;
    for (const word of searchTerms) {
      let inText = filesOf(terms, word), share = 1;
      const inTitle = new Set(filesOf(titleterms, word));
      if (!inText.length && !inTitle.size && word.length > 3) {
        inText = Object.keys(terms).filter((one) => one.startsWith(word)).flatMap((one) => filesOf(terms, one));
        share = 0.5;
      }
      const files = new Set([...inText, ...inTitle]);
      if (!files.size) continue;
      const weight = Math.log(1 + docnames.length / files.size);
      weights.set(word, weight);
      total += weight;
      for (const file of files) {
        matched[file] += weight;
        scores[file] += share * weight * (inTitle.has(file) ? 2.5 : 1);
      }
    }
    const excluded = new Set([...excludedTerms].flatMap((word) => filesOf(terms, word)));
    const results = [];
    docnames.forEach((name, file) => {
      if (!total || matched[file] < 0.35 * total || excluded.has(file)) return;
      // Pages about the code come after pages about its use.
      const inside = /^(docs\/design|bert_jax|data_pipeline|CONTRIBUTING)/.test(name) ? 0.7 : 1;
      const score = (10 * inside * scores[file]) / total / Math.sqrt(0.5 + (0.5 * lengths[file]) / mean);
      results.push([name, titles[file], "", null, score, filenames[file], SearchResultKind.text]);
    });
    const stemmer = new Stemmer();
    for (const [title, places] of Object.entries(alltitles)) {
      const own = new Set(splitQuery(title.toLowerCase()).map((word) => stemmer.stemWord(word)));
      const share = [...weights].reduce((sum, [word, weight]) => sum + (own.has(word) ? weight : 0), 0) / total;
      if (!(share >= 0.5)) continue;
      for (const [file, id] of places) {
        if (id === null || titles[file] === title || excluded.has(file)) continue;
        const score = 20 * share + 8 * Math.min(1, weights.size / own.size);
        const name = `${titles[file]} > ${title}`;
        results.push([docnames[file], name, `#${id}`, null, score, filenames[file], SearchResultKind.title]);
      }
    }
    return results;
  };
  // The excerpt is the part of the page with the most words of the query, not the first place of the last word.
  Search.makeSearchSummary = (html, words, anchor) => {
    const text = Search.htmlToText(html, anchor), lower = text.toLowerCase(), width = 240;
    if (!text) return null;
    const places = [...words].flatMap((word) => {
      const found = [];
      for (let i = lower.indexOf(word); i >= 0; i = lower.indexOf(word, i + 1)) found.push([i, word]);
      return found;
    });
    const near = (first) => new Set(places.filter(([i]) => i >= first && i < first + width - 40).map(([, word]) => word));
    const best = places.reduce(([start, count], [i]) => {
      const more = near(i).size;
      return more > count ? [i, more] : [start, count];
    }, [0, 0]);
    const begin = Math.max(0, best[0] - 40);
    const summary = document.createElement("p");
    summary.classList.add("context");
    const shown = text.slice(begin, begin + width).trim();
    summary.textContent = `${begin ? "..." : ""}${shown}${begin + width < text.length ? "..." : ""}`;
    return summary;
  };
});
