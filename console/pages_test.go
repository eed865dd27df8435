package console

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/testkit"
)

func (f *fake) DrainBroker(_ context.Context, req *srtmv1.DrainBrokerRequest) (*srtmv1.DrainBrokerResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.drains = append(f.drains, fmt.Sprintf("%s undo %v force %v", req.BrokerId, req.Undo, req.Force))
	return &srtmv1.DrainBrokerResponse{}, nil
}

// contains fails for each text that a page lacks.
func contains(t *testing.T, page string, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if !strings.Contains(page, text) {
			t.Errorf("the page lacks %s:\n%s", text, page)
		}
	}
}

// The page of a topic without declared channels shows the channels that brokers have, added up over
// brokers, and the connections that publish to the topic.
func TestTopicPageShowsChannelsAndPublishers(t *testing.T) {
	f := &fake{names: []string{"t"}, brokers: []*srtmv1.Broker{
		{Id: "b1", Connected: true, HttpAddress: "b1", Topics: []string{"t"}}, {Id: "b2", Connected: true, HttpAddress: "b2", Topics: []string{"t"}},
	}}
	_, base, browser := serve(t, f, func(c *Config) {
		c.Brokers = InProcess(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = fmt.Fprintf(w, `{"topics":[{"topic_name":"t","channels":[{"channel_name":"alerts","depth":700,"backend_depth":600,"in_flight_count":3,"deferred_count":1,"client_count":2,"paused":%v}]}],
				"producers":[{"client_id":"sensor-7","remote_address":"10.0.0.7:1","version":"mqtt5","pub_counts":[{"topic":"t","count":42},{"topic":"other","count":1}]},{"client_id":"stranger","pub_counts":[{"topic":"other","count":1}]}]}`, r.URL.Host == "b1")
		}))
	})
	_, page := get(t, browser, base+"/ui/topic?name=t")
	contains(t, page, `<a href="/ui/channel?channel=alerts&amp;topic=t">alerts</a>`, "paused on 1 of 2",
		"<td class=\"n\">1\u202f400</td><td class=\"n\">6</td><td class=\"n\">2</td><td class=\"n\">4</td>", `<th scope="row">sensor-7</th><td>b1</td><td>10.0.0.7:1</td><td class="n">42</td><td class="n">–</td><td></td><td>mqtt5</td>`,
		`<div class="scroll tall" tabindex="0" role="group" aria-label="Publishers">`) // a long list scrolls, and the forms below stay near
	if strings.Contains(page, "stranger") {
		t.Error("the page shows a publisher of another topic")
	}
	if verdict, charts := strings.Index(page, `id="why"`), strings.Index(page, `id="charts"`); verdict < 0 || charts < verdict {
		t.Errorf("the verdict is at %d, the charts at %d", verdict, charts)
	}
}

// A topic is paused, resumed and emptied on all connected brokers. The page asks before it pauses or
// empties, shows on how many brokers the topic is paused, and names brokers that got no request.
func TestTopicIsPausedAndEmptiedOnAllItsBrokers(t *testing.T) {
	f := &fake{names: []string{"t"}}
	for _, id := range []string{"b1", "b2", "b3"} {
		f.brokers = append(f.brokers, &srtmv1.Broker{Id: id, Connected: id != "b3", HttpAddress: id, Topics: []string{"t"}})
	}
	var mu sync.Mutex
	paused := map[string]bool{"b1": true}
	var emptied []string
	_, base, browser := serve(t, f, func(c *Config) {
		c.Brokers = InProcess(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			mu.Lock()
			defer mu.Unlock()
			switch change := strings.TrimPrefix(r.URL.Path, "/topic/"); change {
			case "pause", "unpause":
				paused[r.URL.Host] = change == "pause"
			case "empty":
				emptied = append(emptied, r.URL.Host+" "+r.URL.RawQuery)
			default:
				_, _ = fmt.Fprintf(w, `{"topics":[{"topic_name":"t","depth":1,"paused":%v}]}`, paused[r.URL.Host])
			}
		}))
	})
	_, page := get(t, browser, base+"/ui/topic?name=t")
	contains(t, page, "for tokens or a channel: 2 messages.", "paused on 1 of 2", "Pause the topic", "Empty the topic")
	form := url.Values{"csrf": {csrfOf.FindStringSubmatch(page)[1]}, "topic": {"t"}}
	for what, want := range map[string]string{"pause-topic": "Pause topic t? ", "empty-topic": "Discard the messages that wait in topic t itself?"} {
		_, answer := post(t, browser, base, "/ui/action/"+what, form)
		contains(t, answer, want)
	}
	if paused["b2"] || emptied != nil {
		t.Error("the topic changed before the confirmation")
	}
	_, answer := post(t, browser, base, "/ui/action/unpause-topic", form)
	contains(t, answer, "Resumed on 2 brokers. Disconnected, without a request: b3.")
	testkit.Equal(t, paused["b1"], false, "b1 is paused")
	form.Set("sure", "yes")
	post(t, browser, base, "/ui/action/pause-topic", form)
	testkit.Equal(t, paused["b1"] && paused["b2"], true, "both are paused")
	post(t, browser, base, "/ui/action/empty-topic", form)
	slices.Sort(emptied)
	testkit.EqualSlices(t, emptied, []string{"b1 topic=t", "b2 topic=t"})
}

// A drain is confirmed, begun, forced and undone by the page of the broker.
func TestDrainIsUndone(t *testing.T) {
	f := &fake{names: []string{"t"}, brokers: []*srtmv1.Broker{{Id: "b1", Connected: true, Draining: true, Waits: []*srtmv1.DrainWait{{
		Topic: "t", Reason: "its publishers fit nowhere else: 5 msg/s", Remedy: "add a broker, give one more capacity (srtm broker capacity), lower the topic's rate, or --force",
	}, {Topic: "u", Reason: "the broker is disconnected, and may have messages", Remedy: "start the broker again, or `srtm broker remove b1` if the broker will not return: its messages are lost then"}}}}}
	_, base, browser := serve(t, f, nil)
	_, page := get(t, browser, base+"/ui/broker?id=b1")
	contains(t, page, "Undo the drain", "Force the drain", "Topic t: its publishers fit nowhere else: 5 msg/s. ", "Add a broker, give one more capacity, lower the topic&#39;s rate. ", "Start the broker again. ")
	if strings.Contains(page, "--force") || strings.Contains(page, "`srtm") {
		t.Errorf("the page names flags and commands:\n%s", page)
	}
	form := url.Values{"csrf": {csrfOf.FindStringSubmatch(page)[1]}, "broker": {"b1"}}
	_, answer := post(t, browser, base, "/ui/action/drain", form)
	contains(t, answer, "Drain b1? Its topics move to other brokers.")
	form.Set("force", "yes")
	_, answer = post(t, browser, base, "/ui/action/drain", form)
	contains(t, answer, "Force the drain of b1?")
	testkit.Equal(t, len(f.drains), 0, "drains before the confirmation")
	form.Set("sure", "yes")
	post(t, browser, base, "/ui/action/drain", form)
	form = url.Values{"csrf": form["csrf"], "broker": {"b1"}, "undo": {"yes"}}
	_, answer = post(t, browser, base, "/ui/action/drain", form)
	contains(t, answer, "The drain was undone.")
	testkit.EqualSlices(t, f.drains, []string{"b1 undo false force true", "b1 undo true force false"})
}

// The form of the contract changes only what differs, and only if the topic is as it was shown. A
// fault is reported before the question.
func TestContractIsEdited(t *testing.T) {
	f := &fake{names: []string{"t"}}
	_, base, browser := serve(t, f, nil)
	_, page := get(t, browser, base+"/ui/topic?name=t")
	form := url.Values{"csrf": {csrfOf.FindStringSubmatch(page)[1]}, "topic": {"t"}, "epoch": {"7"}, "rate": {"-5"}, "burst": {"1.5"}, "quantile": {"2"}, "latency": {"soon"}, "over": {"maybe"}}
	code, answer := post(t, browser, base, "/ui/action/contract", form)
	testkit.Equal(t, code, http.StatusBadRequest)
	contains(t, answer, "rate: ", "burst: 1.5 is not a whole number", "quantile: 2 is not a fraction", "latency: ", "neither delay nor reject")
	for key, value := range map[string]string{"rate": "1100", "burst": "50", "quantile": "0.99", "latency": "20ms", "over": "reject"} {
		form.Set(key, value)
	}
	_, answer = post(t, browser, base, "/ui/action/contract", form)
	contains(t, answer, "Change the contract of topic t?")
	testkit.Equal(t, len(f.updates), 0, "updates before the confirmation")
	form.Set("sure", "yes")
	post(t, browser, base, "/ui/action/contract", form)
	if len(f.updates) != 1 {
		t.Fatalf("%d updates", len(f.updates))
	}
	u := f.updates[0]
	paths := map[string]bool{}
	for _, path := range u.UpdateMask.Paths {
		paths[path] = true
	}
	if len(paths) != 2 || !paths["contract.burst"] || !paths["contract.over_limit"] || u.ExpectedEpoch != 7 || u.Spec.Contract.Burst != 50 {
		t.Errorf("%v", u)
	}
}

// A message of the form goes to a broker of the topic, byte for byte.
func TestPublishFromThePage(t *testing.T) {
	var mu sync.Mutex
	var got []string
	_, base, browser := serve(t, &fake{names: []string{"t"}}, func(c *Config) {
		c.Brokers = InProcess(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if body, _ := io.ReadAll(r.Body); r.URL.Path == "/pub" {
				mu.Lock()
				defer mu.Unlock()
				got = append(got, r.Method+" "+r.URL.RequestURI()+" "+string(body))
			}
		}))
	})
	_, page := get(t, browser, base+"/ui/create")
	form := url.Values{"csrf": {csrfOf.FindStringSubmatch(page)[1]}, "topic": {"t"}, "body": {evil}, "delay": {"x"}}
	if code, answer := post(t, browser, base, "/ui/action/publish", form); code != http.StatusBadRequest || got != nil {
		t.Errorf("%d: %s", code, answer)
	}
	form.Set("delay", "500")
	_, answer := post(t, browser, base, "/ui/action/publish", form)
	contains(t, answer, fmt.Sprintf("Published %d bytes to the broker b1.", len(evil)))
	testkit.EqualSlices(t, got, []string{"POST /pub?defer=500&topic=t " + evil})
}

// The page of the next messages formats JSON, counts and filters.
func TestPeekFormatsAndFilters(t *testing.T) {
	var asked string
	_, base, browser := serve(t, &fake{names: []string{"t"}}, func(c *Config) {
		c.Brokers = InProcess(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			asked = r.URL.Query().Get("count")
			_ = json.NewEncoder(w).Encode(map[string]any{"messages": []peeked{{ID: "1", Body: []byte(`{"a":1,"b":[2]}`)}, {ID: "2", Body: []byte("{no json")}}})
		}))
	})
	_, page := get(t, browser, base+"/ui/peek?topic=t&channel=c&count=33")
	contains(t, page, "{\n  &#34;a&#34;: 1,\n  &#34;b&#34;: [\n    2\n  ]\n}", "{no json")
	testkit.Equal(t, asked, "33")
	_, page = get(t, browser, base+"/ui/peek?topic=t&channel=c&filter=no")
	if contains(t, page, "{no json", "Matching: 1 of 2 messages."); strings.Contains(page, "&#34;a&#34;") {
		t.Error("the filter lets everything through")
	}
	if code, _ := get(t, browser, base+"/ui/peek?topic=t&channel=c&count=101"); code != http.StatusBadRequest {
		t.Errorf("a count of 101: %d", code)
	}
}

// The list of topics sorts by its columns, and links to the other order.
func TestTopicsAreSorted(t *testing.T) {
	_, base, browser := serve(t, &fake{names: []string{"a", "b", "c"}}, nil)
	_, page := get(t, browser, base+"/ui/topics?sort=name&desc=1")
	if a, c := strings.Index(page, ">a</a>"), strings.Index(page, ">c</a>"); c < 0 || a < c {
		t.Errorf("a is at %d, c at %d", a, c)
	}
	contains(t, page, `aria-sort="descending"><a href="/ui/topics?sort=name"`)
	if strings.Contains(page, "stands for topics") {
		t.Error("the page explains a sign that it does not have")
	}
}

// Every page is rendered.
func TestEveryPageIsRendered(t *testing.T) {
	c, base, browser := serve(t, &fake{names: []string{"t"}}, func(cfg *Config) {
		cfg.Brokers = InProcess(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `{"topics":[{"topic_name":"t","channels":[{"channel_name":"c"}]}]}`)
		}))
	})
	for path := range c.views() {
		code, page := get(t, browser, base+"/ui"+strings.TrimSuffix(path, "{$}")+"?name=t&a=t&b=t&id=b1&topic=t&channel=c")
		if code != http.StatusOK {
			t.Errorf("%s: %d: %s", path, code, page)
		}
		if path == "/glossary" {
			contains(t, page, `<dt id="share">share</dt>`)
		}
	}
}
