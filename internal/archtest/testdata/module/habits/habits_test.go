package habits

import (
	"net/http"
	"testing"
	"time"
)

func TestServe(t *testing.T) {
	time.Sleep(time.Second) // want "time.Sleep"
	h, _ := Serve()
	if h != http.DefaultServeMux {
		t.Fail()
	}
}
