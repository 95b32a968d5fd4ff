"""How surely the distribution test catches each wrong acceptance at its CI size: share of repetitions caught.

python bench/distribution_power.py [REPETITIONS]
"""

import sys

from tests.support.distribution import MUTANTS, SETTINGS, markov_tests, markov_texts

NUM_SEEDS = 800


def main() -> None:
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    print(f"{NUM_SEEDS} texts per test, {repetitions} repetitions; caught with 1 / 3 drafts (argmax)")
    for name, rule in {"(right)": None, **MUTANTS}.items():
        for setting, params in SETTINGS.items():
            shares = []
            for num_drafts in (1, 3):
                caught = 0
                for i in range(repetitions):
                    given = {} if rule is None else {"rule": rule}
                    texts = markov_texts(params, num_drafts, NUM_SEEDS, first_seed=(i + 1) << 20, shared=False, **given)
                    caught += not all(test.passes for test in markov_tests(params, texts))
                shares.append(f"{caught / repetitions:.2f}")
            print(f"{name:45} {setting:24} {' / '.join(shares)}", flush=True)


if __name__ == "__main__":
    main()
