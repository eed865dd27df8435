package daemon

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// A browser that asks for / is sent to the pages. A program gets the answer of the API.
func TestBrowsersAreSentToThePages(t *testing.T) {
	h := WithPages(http.NotFoundHandler(), http.NotFoundHandler(), "/ui/")
	for accept, want := range map[string]int{"text/html,application/xhtml+xml": http.StatusFound, "*/*": http.StatusNotFound, "": http.StatusNotFound} {
		w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header.Set("Accept", accept)
		h.ServeHTTP(w, r)
		testkit.Equal(t, w.Code, want, "Accept: %q", accept)
		if want == http.StatusFound {
			testkit.Equal(t, w.Header().Get("Location"), "/ui/")
		}
	}
}
