// What every JavaScript client is asked, and how its script tells the outcome: one line of JSON for each check.
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';

export const [URL, MODEL] = process.argv.slice(2);
export const PICTURE = readFileSync(
  new globalThis.URL('../../../deploy/demo_model/examples/red_circle.png', import.meta.url),
);
export const PICTURE_URI = `data:image/png;base64,${PICTURE.toString('base64')}`;
export const LONG = 300; // tokens that a call has room in
export const [DESCRIBE, SEEN] = ['Describe the image.', 'The image shows a red circle.'];
export const [COUNT, COUNTED] = ['Count from 3 to 9.', '3, 4, 5, 6, 7, 8, 9.'];
export const SCHEMA = {
  type: 'object',
  properties: { colour: { type: 'string', enum: ['red', 'blue'] }, is_round: { type: 'boolean' } },
  required: ['colour', 'is_round'],
  additionalProperties: false,
};

export function isShape(found) {
  assert.deepEqual(Object.keys(found).sort(), ['colour', 'is_round']);
  assert.ok(['red', 'blue'].includes(found.colour) && typeof found.is_round === 'boolean');
}

/** `name`: the package, in the folder where the script runs. */
export async function run(name, checks) {
  const { version } = JSON.parse(readFileSync(`${process.cwd()}/node_modules/${name}/package.json`));
  for (const [check, body] of Object.entries(checks)) {
    let error = '';
    try {
      await body();
    } catch (caught) {
      error = String(caught).slice(0, 600);
      console.error(caught);
      process.exitCode = 1;
    }
    console.log(JSON.stringify({ client: `${name} (JavaScript)`, version, check, error }));
  }
}
