package conformance

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// difference is an intended difference between SRTM's nsqd and NSQ's. A case that meets a difference
// asserts NSQ's behaviour on NSQ's nsqd and SRTM's on SRTM's, so that neither side is left untested.
type difference struct {
	Key  string // name of the difference in cases
	NSQ  string // behaviour of NSQ's nsqd
	SRTM string // behaviour of SRTM's nsqd
	Why  string
	Page string // text about the difference in docs/protocol.md
}

var deliberate = []difference{
	{
		Key:  "mpub-total",
		NSQ:  "holds the size that an MPUB gives for its body to --max-body-size, but not its messages",
		SRTM: "E_BAD_BODY where the messages with their count and sizes are larger",
		Why:  "a bound that the sender's word gets around is none",
		Page: "an MPUB of more than `--max-body-size`",
	},
	{
		Key:  "consumer-left",
		NSQ:  "messages that a consumer held when its connection ended wait for their timeout",
		SRTM: "they are given to another consumer at once",
		Why:  "no client can finish them any more; a minute of silence would break any latency objective",
		Page: "messages in flight to a consumer that left",
	},
	{
		Key:  "req-negative",
		NSQ:  "E_INVALID, which closes the connection",
		SRTM: "requeues at once",
		Why:  "as a delay over the maximum is cut: what a client computes for its back-off must not cost its connection",
		Page: "REQ with a delay out of range",
	},
	{
		Key:  "rate-limit",
		NSQ:  "takes what comes",
		SRTM: "E_RATE_LIMITED with a hint when to retry, not fatal, where the topic's contract says reject; 429 over HTTP",
		Why:  "the contract; the client keeps its connection",
		Page: "`E_RATE_LIMITED retry_after_ms=N`",
	},
	{
		Key:  "queue-full",
		NSQ:  "E_PUB_FAILED, which closes the connection, when the disk is full; drops what an ephemeral topic has no room for",
		SRTM: "E_QUEUE_FULL, not fatal, for both; 503 over HTTP",
		Why:  "a disk has room again without a restart, and so has a topic; what was answered with OK is not dropped",
		Page: "| `E_QUEUE_FULL` |",
	},
	{
		Key:  "identity-text",
		NSQ:  "takes client_id, hostname and user_agent of any length",
		SRTM: "E_BAD_BODY above 256 bytes each",
		Why:  "every connection keeps them as long as it lives",
		Page: "at most 256 bytes, as are `hostname` and `user_agent`",
	},
	{
		Key:  "identity-size",
		NSQ:  "takes an IDENTIFY or AUTH body of up to --max-body-size",
		SRTM: "E_BAD_BODY above 64 KiB",
		Why:  "it is parsed while other clients wait, and has nothing to say that takes more",
		Page: "IDENTIFY and AUTH body",
	},
	{
		Key:  "http-auth",
		NSQ:  "lets all clients publish over HTTP, also with --auth-http-address",
		SRTM: "asks the auth server for publishers over HTTP, too; 401 without a secret, 403 without permission",
		Why:  "what takes permission over TCP must not be open beside it",
		Page: "publishing over HTTP with `--auth-http-address`",
	},
	{
		Key:  "eager-flush",
		NSQ:  "keeps a message until output_buffer_size is full or output_buffer_timeout is over",
		SRTM: "writes when nothing more is ready; the timeout is an upper bound",
		Why:  "client libraries request 250 ms by default, which no latency objective survives",
		Page: "`output_buffer_timeout` is an upper bound",
	},
}

// seen has the keys of the deliberate differences that cases met.
var seen = struct {
	sync.Mutex
	keys map[string]bool
}{keys: map[string]bool{}}

// unlike reports whether SRTM's nsqd is under test, which behaves as the entry with this key states.
func unlike(t *testing.T, key string) bool {
	t.Helper()
	for _, d := range deliberate {
		if d.Key == key {
			seen.Lock()
			seen.keys[key] = true
			seen.Unlock()
			return under.srtm
		}
	}
	t.Fatalf("the list of deliberate differences has no entry %q", key)
	return false
}

// staleEntries returns an error if an entry of the lists is unused.
func staleEntries() error {
	seen.Lock()
	defer seen.Unlock()
	var errs []error
	for _, d := range deliberate {
		if !seen.keys[d.Key] {
			errs = append(errs, fmt.Errorf("no case met the deliberate difference %q", d.Key))
		}
	}
	return errors.Join(errs...)
}

// Every deliberate difference states its reason, and the protocol page lists it.
func TestDifferencesAreDocumented(t *testing.T) {
	page := testkit.Result(os.ReadFile("../../docs/protocol.md")).Must(t)
	keys := map[string]bool{}
	for _, d := range deliberate {
		if d.Key == "" || d.NSQ == "" || d.SRTM == "" || d.Why == "" || keys[d.Key] {
			t.Errorf("entry %+v lacks something or is there twice", d)
		}
		keys[d.Key] = true
		if d.Page == "" || !strings.Contains(string(page), d.Page) {
			t.Errorf("docs/protocol.md does not have %q, for %s", d.Page, d.Key)
		}
	}
}
