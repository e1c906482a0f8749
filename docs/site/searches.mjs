// Asks the search of a built site, in the site's own worker: node searches.mjs SITE < queries (a JSON list).
// Prints, for each query, the pages that the reader sees, the best first.
import fs from "node:fs";
import path from "node:path";
import vm from "node:vm";

const site = process.argv[2];
const workers = path.join(site, "assets/javascripts/workers");
const worker = fs.readdirSync(workers).find((name) => name.endsWith(".js"));
const { config, docs } = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));

let listener, answered;
const scope = {
  console,
  addEventListener: (_, heard) => (listener = heard),
  postMessage: (answer) => answered(answer),
};
scope.self = scope;
vm.runInNewContext(fs.readFileSync(path.join(workers, worker), "utf8"), scope);
const ask = (data) => new Promise((resolve) => ((answered = resolve), listener({ data })));

await ask({ type: 0, data: { config, docs, options: { suggest: false } } });
const found = {};
for (const query of JSON.parse(fs.readFileSync(0, "utf8"))) {
  const { data } = await ask({ type: 2, data: query });
  found[query] = data.items.map((sections) => sections[0].location.split("#")[0]);
}
console.log(JSON.stringify(found));
