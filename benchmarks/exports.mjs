// Answers of transformers.js for the texts of a JSON file: node exports.mjs MODULES FOLDER TASK DTYPE TEXTS ANSWERS
import fs from 'node:fs';
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';

const [modules, folder, task, dtype, texts, answers] = process.argv.slice(2);
const entry = createRequire(`${modules}/`).resolve('@huggingface/transformers');
const { pipeline, env } = await import(pathToFileURL(entry));
env.allowRemoteModels = false;
const run = await pipeline(task, folder, { dtype, local_files_only: true });
const found = [];
for (const text of JSON.parse(fs.readFileSync(texts, 'utf8'))) {
  if (task === 'feature-extraction') found.push(Array.from((await run(text, { pooling: 'mean', normalize: true })).data));
  else found.push(await run(text, { top_k: 5 }));
}
fs.writeFileSync(answers, JSON.stringify({ version: env.version, answers: found }));
