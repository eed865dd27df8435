package proxy

import (
	"fmt"
	"net/http"
	"testing"
)

// A request target that is not a path, whatever follows the scheme, is not passed on. The class did
// not consider the path that the server would find in the target.
func TestTargetsWithoutAPath(t *testing.T) {
	url := backend(t, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%q %q %q", r.RequestURI, r.URL.Path, r.Host)
	})
	g := serve(t, one(url, "[[class]]\nname = \"paid\"\nmatch = [{ path = \"/paid\" }]"), nil)
	for _, target := range []string{"x:http://shop.example/paid", "http:paid", "x:paid", "x:*", "x:%2e"} {
		res, body := g.get(t, target)
		if res.StatusCode != http.StatusBadRequest {
			t.Errorf("%s: %d %s, class %s", target, res.StatusCode, body, res.Header.Get(classHeader))
		}
	}
	for _, target := range []string{"http://shop.example/paid", "/paid"} {
		if res, body := g.get(t, target); res.Header.Get(classHeader) != "paid" {
			t.Errorf("%s: %d %s, class %s", target, res.StatusCode, body, res.Header.Get(classHeader))
		}
	}
}
