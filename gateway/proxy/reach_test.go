package proxy

import (
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// A server that speaks only HTTP/2 in clear, as gRPC servers do, gets HTTP/2, including trailers.
func TestServersThatSpeakHTTP2InClear(t *testing.T) {
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "Grpc-Status")
		fmt.Fprintf(w, "%d", r.ProtoMajor)
		w.Header().Set("Grpc-Status", "0")
	}))
	s.Config.Protocols = &http.Protocols{}
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	t.Cleanup(s.Close)
	g := serve(t, "[[server]]\nurl = \"h2c"+strings.TrimPrefix(s.URL, "http")+"\"", nil)
	res, body := g.get(t, "/", "TE: trailers")
	testkit.Equal(t, body, "2", "the protocol of the server")
	testkit.Equal(t, res.Trailer.Get("Grpc-Status"), "0", "trailer")
	g.idle(t)
}

// Each server may have its own host name, and certificates of its own authority.
func TestServerWithItsOwnHostAndAuthority(t *testing.T) {
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.Host+" "+r.TLS.ServerName)
	}))
	t.Cleanup(s.Close)
	ca := testkit.File(t, "ca.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})))
	text := fmt.Sprintf("[[server]]\nurl = %q\n", s.URL)
	g := serve(t, text+fmt.Sprintf("host = \"example.com\"\nca_file = %q\n", ca), nil)
	res, body := g.get(t, "/")
	if res.StatusCode != http.StatusOK || body != "example.com example.com" {
		t.Errorf("%s, %q", res.Status, body)
	}
	testkit.Must(t, g.SetPolicy(parse(t, text)))
	if res, _ := g.get(t, "/"); res.StatusCode != http.StatusBadGateway {
		t.Errorf("without the authority: %s", res.Status)
	}
	if err := g.SetPolicy(parse(t, text+"ca_file = \"/none\"")); err == nil {
		t.Error("an authority that is not there was taken")
	}
}
