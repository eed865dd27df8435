package console

import (
	"context"
	"net/url"
)

// compare shows two topics side by side. The topics need not exist yet.
func (c *Console) compare(ctx context.Context, q url.Values, _ user) (view, error) {
	a, b := q.Get("a"), q.Get("b")
	if a == "" || b == "" {
		return view{}, &problem{400, "Name two topics to compare: ?a=…&b=…"}
	}
	return view{Template: "compare", Title: a + " beside " + b, Crumbs: []link{{"Topics", "/ui/topics"}}, Topics: []string{a, b}, Data: [2]side{c.evaluate(ctx, a), c.evaluate(ctx, b)}}, nil
}
