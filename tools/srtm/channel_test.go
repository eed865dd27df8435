package main

import (
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
)

// node is a broker's HTTP API that records its requests.
func node(t *testing.T, answer string) (address string, asked *[]string) {
	t.Helper()
	asked = new([]string)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		*asked = append(*asked, r.Method+" "+r.URL.String()+" "+r.Header.Get("Authorization"))
		if answer == "" {
			http.Error(w, `{"message":"CHANNEL_NOT_FOUND"}`, http.StatusNotFound)
			return
		}
		_, _ = w.Write([]byte(answer))
	}))
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://"), asked
}

// A broker that requires TLS announces TLS over plain HTTP, and gets the token over HTTPS.
func TestChannelsOfABrokerWithTLS(t *testing.T) {
	authority := testkit.NewAuthority(t)
	var tokens []string
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tokens = append(tokens, r.URL.Path+" "+r.Header.Get("Authorization"))
		_, _ = w.Write([]byte(`{"offset":7,"messages":[{"id":"0123","body":"AP8="}]}`))
	}))
	s.TLS = &tls.Config{Certificates: []tls.Certificate{authority.Certificate("b1").TLS}}
	s.StartTLS()
	t.Cleanup(s.Close)
	_, port, _ := net.SplitHostPort(s.Listener.Addr().String())
	plain := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tokens = append(tokens, r.URL.Path+" "+r.Header.Get("Authorization"))
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprintf(w, `{"message":"TLS_REQUIRED","https_port":%s}`, port)
	}))
	t.Cleanup(plain.Close)
	file := testkit.File(t, "token", "0123456789abcdef\n")
	address := serve(t, &admin{brokers: []*srtmv1.Broker{
		{Id: "b1", HttpAddress: strings.TrimPrefix(plain.URL, "http://"), Connected: true, Topics: []string{"t"}},
	}})
	_, _, err := srtm(t, address, "channel", "peek", "t", "c")
	testkit.ErrorHas(t, err, "the broker requires TLS: say whom it is trusted by, with --nsqd-tls-ca", "in clear")
	tokens = nil
	out, _, err := srtm(t, address, "channel", "peek", "t", "c", "--nsqd-tls-ca="+authority.File, "--nsqd-token-file="+file)
	if err != nil || !strings.Contains(out, `"\x00\xff"`) {
		t.Errorf("%v\n%s", err, out)
	}
	testkit.EqualSlices(t, tokens, []string{"/ping ", "/channel/peek Bearer 0123456789abcdef"}, "asked")
}

// A token is for one address only. Go's client would send the token to other ports of a host, and to its subdomains.
func TestTokensFollowNoRedirect(t *testing.T) {
	elsewhere, asked := node(t, `{"messages":[]}`)
	broker := httptest.NewServer(http.RedirectHandler("http://"+elsewhere+"/channel/peek", http.StatusTemporaryRedirect))
	t.Cleanup(broker.Close)
	file := testkit.File(t, "token", "0123456789abcdef\n")
	_, _, err := srtm(t, "", "channel", "peek", "t", "c", "--nsqd-http-address="+broker.URL, "--nsqd-token-file="+file)
	testkit.ErrorHas(t, err, "307")
	testkit.EqualSlices(t, *asked, nil, "asked elsewhere")
}

func TestChannelsOfAllBrokers(t *testing.T) {
	b1, first := node(t, `{"offset":7,"messages":[{"id":"0123","offset":7,"timestamp":1000000001,"attempts":2,"body":"AP8="}]}`)
	b2, second := node(t, "")
	a := &admin{brokers: []*srtmv1.Broker{
		{Id: "b1", HttpAddress: b1, Connected: true, Topics: []string{"t"}},
		{Id: "b2", HttpAddress: b2, Connected: true, Topics: []string{"t"}},
		{Id: "b3", HttpAddress: "127.0.0.1:1", Connected: true},
	}}
	address := serve(t, a)
	for _, to := range []string{"begin", "end", "2026-01-02T15:04:05.5Z", "7"} {
		out, _, err := srtm(t, address, "channel", "seek", "t", "c", "--broker=b9", "--to="+to)
		if err == nil || !strings.Contains(err.Error(), "broker b2: CHANNEL_UNKNOWN: no such channel") || !strings.Contains(out, "b1      7") {
			t.Errorf("%v\n%s", err, out)
		}
		r := a.sought[len(a.sought)-1]
		if r.Topic != "t" || r.Channel != "c" || r.BrokerId != "b9" || !strings.Contains(r.To.String(), map[string]string{
			"begin": "begin:{}", "end": "end:{}", "7": "offset:7",
		}[to]) || strings.HasPrefix(to, "2026") && !r.To.GetTime().AsTime().Equal(time.Date(2026, 1, 2, 15, 4, 5, 5e8, time.UTC)) {
			t.Errorf("--to=%s asked %v", to, r)
		}
	}
	a.refuse = status.Error(codes.Unavailable, "nothing was done")
	if out, _, err := srtm(t, address, "channel", "seek", "t", "c", "--to=begin"); err == nil || !strings.Contains(err.Error(), "nothing was done") || out != "" {
		t.Errorf("%v\n%s", err, out)
	}

	out, _, err := srtm(t, "", "channel", "seek", "t", "c", "--to=2026-01-02T15:04:05Z", "--nsqd-http-address", b1, "--nsqd-http-address", b2)
	if err != nil || !strings.Contains(out, b1+"  7") {
		t.Errorf("one of two brokers lacks the channel: %v\n%s", err, out)
	}
	_, _, err = srtm(t, "", "channel", "seek", "t", "c", "--to=begin", "--nsqd-http-address", b2)
	testkit.ErrorHas(t, err, "CHANNEL_NOT_FOUND")
	*second = (*second)[:1]
	const seek = "POST /channel/seek?channel=c&to=2026-01-02T15%3A04%3A05Z&topic=t "
	if len(*first) != 1 || (*first)[0] != seek || len(*second) != 1 || (*second)[0] != seek {
		t.Errorf("asked %q and %q", *first, *second)
	}

	file := testkit.File(t, "token", "0123456789abcdef\n")
	out, _, err = srtm(t, "", "channel", "peek", "t", "c", "--count=3", "--nsqd-http-address", "http://"+b1, "--nsqd-token-file", file)
	if err != nil || !strings.Contains(out, `1970-01-01T00:00:01.000000001Z  2         0123  "\x00\xff"`) {
		t.Errorf("%v\n%s", err, out)
	}
	testkit.Equal(t, (*first)[1], "GET /channel/peek?channel=c&count=3&topic=t Bearer 0123456789abcdef", "asked")
	out, _, err = srtm(t, "", "channel", "peek", "t", "c", "--output=json", "--nsqd-http-address", b1)
	if err != nil || !strings.Contains(out, `"body_base64": "AP8="`) {
		t.Errorf("%v\n%s", err, out)
	}

	before, asked := len(*first), len(a.sought)
	for _, args := range [][]string{
		{"channel", "seek", "t", "c"}, {"channel", "seek", "t", "c", "--to=-1"}, {"channel", "seek", "t"}, {"channel", "peek", "none", "c"},
		{"channel", "seek", "t", "c", "--to=0", "--nsqd-http-address", b1, "--nsqd-http-address", b2},
	} {
		if out, _, err := srtm(t, address, args...); err == nil {
			t.Errorf("%q: %s", args, out)
		}
	}
	a.brokers[1].Connected = false
	_, _, err = srtm(t, address, "channel", "peek", "t", "c")
	testkit.ErrorHas(t, err, "nothing was done")
	if len(*first) != before || len(a.sought) != asked {
		t.Errorf("asked %q and %v", (*first)[before:], a.sought[asked:])
	}
}

func TestChangesOfChannels(t *testing.T) {
	a := &admin{}
	address := serve(t, a)
	for _, c := range []struct{ verb, want string }{
		{"create", "channel c of topic t is created\n"}, {"pause", "channel c of topic t is paused\nbrokers that will apply it when they are back: b2, b3\n"},
		{"unpause", "channel c of topic t is resumed\n"}, {"delete", "channel c of topic t is deleted\n"}, {"empty", "channel c of topic t is empty on b1\n"},
	} {
		out, _, err := srtm(t, address, "channel", c.verb, "t", "c")
		if failed := c.verb == "empty"; out != c.want || (err != nil) != failed || failed && err.Error() != "broker b2: BROKER_FAILED: it left" {
			t.Errorf("%s: %q, %v", c.verb, out, err)
		}
		if want := c.verb + " t c"; a.changed[len(a.changed)-1] != want {
			t.Errorf("asked %q, want %s", a.changed, want)
		}
	}
	out, _, err := srtm(t, address, "channel", "list", "t")
	testkit.Must(t, err)
	testkit.Equal(t, out, "CHANNEL  STATE\nalerts   paused\nbilling  active\n")
	out, _, err = srtm(t, address, "channel", "pause", "t", "c", "--output=json")
	testkit.Must(t, err)
	testkit.Equal(t, out, "{\n  \"paused\": \"c\",\n  \"pending\": [\n    \"b2\",\n    \"b3\"\n  ]\n}\n")
	a.refuse = status.Error(codes.NotFound, "no such channel")
	for _, verb := range []string{"create", "pause", "unpause", "delete", "empty"} {
		if out, _, err := srtm(t, address, "channel", verb, "t", "c"); err == nil || err.Error() != "no such channel" || out != "" {
			t.Errorf("%s: %q, %v", verb, out, err)
		}
	}
}
