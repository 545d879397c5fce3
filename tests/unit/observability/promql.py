"""What an expression reads: its selectors and the names of its metrics."""

import promql_parser


def selectors(expr: str) -> list[promql_parser.VectorSelector]:
    """Every selector, also those inside ranges. ValueError if `expr` is not PromQL."""
    found: list[promql_parser.VectorSelector] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        elif isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)

    promql_parser.walk(promql_parser.parse(expr), visit)
    return list({str(one): one for one in found}.values())


def metrics_of(expr: str) -> set[str]:
    """Names of the metrics that `expr` reads."""
    return {str(one.name) for one in selectors(expr)}
