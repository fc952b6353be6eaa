"""Runs the benchmarks of this folder: what `make bench` does.

    python benchmarks/run.py                        all that this machine can run in minutes
    python benchmarks/run.py multi_head --quick     one, to try things out
    python benchmarks/run.py --help                 all options
"""
import sys

import measure


def main():
    chosen = measure.options().parse_args()
    found = measure.benchmarks()
    if chosen.list and not chosen.names:
        for name, module in found.items():
            print(f"{name:12} {module.DEVICE:5} {measure.says(module)}")
        return
    if unknown := [name for name in chosen.names if name not in found]:
        sys.exit(f"There is no benchmark {unknown[0]}; there are {', '.join(found)}.")
    names = chosen.names or [name for name, module in found.items() if not getattr(module, "HOURS", False)]
    sys.exit(max(measure.run(name, found[name], chosen) for name in names))


if __name__ == "__main__":
    main()
