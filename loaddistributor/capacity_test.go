package main

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/shortage"
	"github.com/srtm-io/srtm/loaddistributor/webhook"
)

func TestFaultsOfTheWebhook(t *testing.T) {
	authority := testkit.NewAuthority(t)
	token := testkit.File(t, "token", "scaler-0123456789abcdef\n")
	for name, c := range map[string]struct {
		flags []string
		want  string
	}{
		"no URL":                       {[]string{"--capacity-webhook=scaler:80"}, "--capacity-webhook: want http://host/path"},
		"https without an authority":   {[]string{"--capacity-webhook=https://scaler/"}, "https needs the authorities"},
		"an authority, but in clear":   {[]string{"--capacity-webhook=http://scaler/", "--capacity-webhook-tls-ca=" + authority.File}, "want https"},
		"a token in clear":             {[]string{"--capacity-webhook=http://scaler/", "--capacity-webhook-token-file=" + token}, "a token is not sent in clear"},
		"a password in the URL":        {[]string{"--capacity-webhook=http://u:p@scaler/"}, "use a token"},
		"a token for nobody":           {[]string{"--capacity-webhook-token-file=" + token}, "needs --capacity-webhook"},
		"a threshold that is none":     {[]string{"--capacity-threshold=-1"}, "--capacity-threshold -1: want more than 0"},
		"a threshold beyond all there": {[]string{"--capacity-threshold=1.5"}, "--capacity-threshold 1.5: want more than 0"},
	} {
		_, _, err := new(options).program().Parse(append([]string{"--store=memory"}, c.flags...), io.Discard)
		testkit.ErrorHas(t, err, c.want, "%s", name)
	}
}

// The receiver gets the document over TLS, with the token. The log and the errors do not contain
// the token.
func TestTheReceiverGetsTokenAndNumbers(t *testing.T) {
	type post struct{ auth, body string }
	got := make(chan post, 1)
	receiver := httptest.NewTLSServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got <- post{r.Header.Get("Authorization"), string(body)}
	}))
	defer receiver.Close()
	ca := testkit.File(t, "ca.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: receiver.Certificate().Raw})))
	var o options
	log, _, err := o.program().Parse([]string{
		"--store=memory", "--capacity-webhook=" + receiver.URL + "/brokers", "--capacity-webhook-tls-ca=" + ca,
		"--capacity-webhook-token-file=" + testkit.File(t, "token", "scaler-0123456789abcdef\n"),
	}, io.Discard)
	testkit.Must(t, err)
	hook := *o.hook
	hook.Log = log
	posts := webhook.New(hook)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- posts.Run(ctx) }()
	posts.Send(lacking(shortage.Need{Brokers: 2, Present: 3, Capacity: 90, Allocated: 80, Refused: 1, RefusedRate: 60}, time.Unix(0, 0)))
	p := <-got
	cancel()
	testkit.Must(t, <-ended)
	testkit.Equal(t, p.auth, "Bearer scaler-0123456789abcdef")
	var document map[string]any
	testkit.Must(t, json.Unmarshal([]byte(p.body), &document))
	for field, want := range map[string]any{
		"brokers_needed": 2., "brokers": 3., "capacity_messages_per_second": 90., "allocated_messages_per_second": 80., "topics_refused": 1.,
		"refused_messages_per_second": 60., "topics_missing_slo_on_all_brokers": 0., "at": "1970-01-01T00:00:00Z",
		"reason": "topics refused for want of capacity: 1 (60 msg/s); 80 of 90 msg/s are allocated",
	} {
		testkit.Equal(t, document[field], want, "%s", field)
	}
}
