// Order of search results: guides and reference first, then the API, then the pages for developers.
var Scorer = {
  score: ([page, , , , score]) => {
    if (page.startsWith("docs/") || page === "README") return score + 20;
    return page.startsWith("design/") || page === "CHANGELOG" || page === "CONTRIBUTING" ? score - 20 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: {0: 15, 1: 5, 2: -5},
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
