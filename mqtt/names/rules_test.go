package names_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/mqtt/names"
	"github.com/srtm-io/srtm/nsq/wire"
)

const fleet = `
[[mqtt]]
filter = "fleet/+/telemetry"
topic = "telemetry"
publisher = "{1}"
envelope = "cloudevents"

[[mqtt]]
filter = "tenants/+/+/#"
topic = "tenant-{1}"
publisher = "{1}.{2}"

[[mqtt]]
filter = "fleet/#"
topic = "fleet"
publisher = "{1}"
`

func parse(t testing.TB, text string) *names.Rules {
	t.Helper()
	return testkit.Result(names.Parse([]byte(text))).Must(t)
}

func TestMap(t *testing.T) {
	rules := parse(t, fleet)
	for name, want := range map[string]string{
		"fleet/truck-17/telemetry":       "telemetry truck-17 cloudevents",
		"fleet/truck-17/alarm":           "fleet truck-17/alarm",
		"fleet":                          "fleet ",
		"tenants/acme/dev-1/temperature": "tenant-acme acme.dev-1",
		"tenants/acme/dev-1":             "tenant-acme acme.dev-1",
		"tenants/a b/dev-1":              "none", // no valid topic name
		"tenants//dev-1":                 "tenant- .dev-1",
		"alone":                          "alone ",
		"alone#ephemeral":                "alone#ephemeral ", // # is refused before
		"two/levels":                     "none",
		"$SYS/x":                         "none",
	} {
		target, scratch, ok := rules.Map([]byte(name), []byte("kept"))
		got := "none"
		if ok {
			got = fmt.Sprintf("%s %s", target.Topic, target.Publisher)
		}
		if target.Envelope {
			got += " cloudevents"
		}
		testkit.Equal(t, got, want, name)
		testkit.Equal(t, string(scratch[:4]), "kept")
	}
}

func TestTopics(t *testing.T) {
	rules := parse(t, fleet)
	for filter, want := range map[string]string{
		"fleet/+/telemetry":      "[telemetry]",
		"fleet/truck-17/+":       "[telemetry fleet]",
		"fleet/#":                "[telemetry fleet]",
		"fleet/a/telemetry":      "[telemetry]",
		"fleet/a/alarm":          "[fleet]",
		"fleet":                  "[fleet]",
		"tenants/acme/#":         "[tenant-acme]",
		"tenants/acme/+/x":       "[tenant-acme]",
		"tenants/+/dev-1/x":      names.ErrOpen.Error(),
		"#":                      names.ErrOpen.Error(),
		"+/truck-17/telemetry":   "[telemetry tenant-truck-17 fleet]",
		"+/truck-17/telemetry/x": "[tenant-truck-17 fleet]",
		"telemetry":              "[telemetry]",
		"other":                  "[other]",
		"other/x":                names.ErrNoTopic.Error(),
		"other/#":                names.ErrNoTopic.Error(),
		"+":                      "[fleet]",
	} {
		topics, err := rules.Topics(filter, names.MaxRules)
		if err == nil {
			testkit.Equal(t, fmt.Sprint(topics), want, filter)
		} else {
			testkit.ErrorHas(t, err, want, filter)
		}
	}
}

func TestTopicsAreLimited(t *testing.T) {
	rules := parse(t, fleet)
	_, err := rules.Topics("fleet/#", 1)
	testkit.ErrorIs(t, err, names.ErrTooMany)
	_, err = rules.Topics("alone", 0)
	testkit.ErrorIs(t, err, names.ErrTooMany)
	_, err = rules.Topics("two/levels", 0)
	testkit.ErrorIs(t, err, names.ErrNoTopic)
}

func TestSharedChannel(t *testing.T) {
	rules := parse(t, fleet)
	for _, c := range []struct {
		filter   string
		complete bool
	}{
		{"fleet/+/telemetry", true},
		{"fleet/#", true},
		{"+/+/telemetry", false}, // of the topic fleet, a part
		{"fleet/a/telemetry", false},
		{"tenants/acme/#", true},
		{"tenants/acme/+/#", true},
		{"tenants/acme/dev-1/#", false},
		{"alone", true},
		{"telemetry", false}, // a part of what fleet/+/telemetry puts there
	} {
		topics, err := rules.Topics(c.filter, names.MaxRules)
		if errors.Is(err, names.ErrOpen) {
			continue
		}
		testkit.Must(t, err)
		channel := rules.SharedChannel("workers", c.filter, topics)
		testkit.Equal(t, channel == "workers", c.complete, c.filter, channel)
		if !wire.ValidChannelName(channel) {
			t.Errorf("%q is no channel name", channel)
		}
	}
	long := strings.Repeat("w", wire.MaxNameLength)
	channel := rules.SharedChannel(long, "fleet/a/telemetry", []string{"telemetry"})
	if !wire.ValidChannelName(channel) || channel == rules.SharedChannel(long, "fleet/b/telemetry", []string{"telemetry"}) {
		t.Errorf("channel %q", channel)
	}
}

func TestFaultsOfRules(t *testing.T) {
	for text, want := range map[string]string{
		"x = 1":                                                       "unknown key x",
		"[[mqtt]]\nfilter = 3":                                        "incompatible types",
		"[[mqtt]]\nfilter = \"a\nb\"":                                 "line 2",
		"[[mqtt]]\nfilter = \"a#\"":                                   `rule 1 (filter "a#"): the filter has a wildcard beside`,
		"[[mqtt]]\nfilter = \"a\"":                                    `rule 1 (filter "a"): topic "" is not a valid SRTM topic name`,
		"[[mqtt]]\nfilter = \"a\"\ntopc":                              "line 3",
		rule("a", "b c", ""):                                          `topic "b c" is not a valid SRTM topic name`,
		rule("a/+", "{2}", ""):                                        `topic "{2}" refers to {2}, but the filter has 1 wildcards`,
		rule("a/+", "{0}", ""):                                        "refers to {0}",
		rule("a/+", "{x}", ""):                                        "refers to {x}",
		rule("a/+", "{1", ""):                                         "refers to {1",
		rule("a/+", "t", "}"):                                         `publisher "}" has } without {`,
		rule("a/#", "{1}", ""):                                        "refers to {1}, but # may stand for several levels",
		rule("a/+", "b{1}c d", ""):                                    "is not a valid SRTM topic name",
		rule("$share/g/a", "t", ""):                                   "a rule has no $share",
		rule("a", "t", "") + "envelope = \"json\"":                    `envelope "json" is not "cloudevents"`,
		rule("a", "t", "") + "topik = \"json\"":                       "unknown key mqtt.topik",
		rule("a/#", "t", "") + rule("a/b", "t", ""):                   `rule 2 (filter "a/b") never applies: the earlier filter "a/#"`,
		rule("a#", "t", "") + rule("b", "b c", ""):                    `rule 2 (filter "b"): topic "b c"`,
		strings.Repeat(rule("a", "t", ""), names.MaxRules+1):          "257 rules are more than 256",
		strings.Repeat("#", names.MaxRulesSize+1):                     "bytes of rules are more than",
		rule("a/+", strings.Repeat("x", wire.MaxNameLength), "") + "": "",
	} {
		rules, err := names.Parse([]byte(text))
		wantFault(t, err, want, text[:min(len(text), 80)])
		if err != nil && rules != nil {
			t.Error("faults and rules")
		}
	}
}

func rule(filter, topic, publisher string) string {
	return fmt.Sprintf("[[mqtt]]\nfilter = %q\ntopic = %q\npublisher = %q\n", filter, topic, publisher)
}

// The topics of a filter have every message that matches the filter, and a complete filter matches every
// message of its topics.
func TestTopicsAndCompleteAgreeWithMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := ""
		for i := range rapid.IntRange(0, 3).Draw(t, "rules") {
			filter := drawFilter(t, "rule")
			topic := rapid.SampledFrom([]string{"t", "u", "a", fmt.Sprint("r", i)}).Draw(t, "topic")
			if strings.Contains(filter, "+") && rapid.Bool().Draw(t, "captures") {
				topic = rapid.SampledFrom([]string{"t-{1}", "{1}"}).Draw(t, "template")
			}
			text += rule(filter, topic, "")
		}
		rules, err := names.Parse([]byte(text))
		if err != nil {
			return // a rule never applies
		}
		filter := drawFilter(t, "filter")
		topics, err := rules.Topics(filter, names.MaxRules)
		if err != nil {
			topics = nil
		}
		complete := rules.Complete(filter, topics)
		for _, name := range universe {
			target, _, ok := rules.Map([]byte(name), nil)
			if !ok {
				continue
			}
			match := names.Match(filter, []byte(name))
			listed := false
			for _, topic := range topics {
				listed = listed || topic == string(target.Topic)
			}
			identity := string(target.Topic) == name // a name of one level, which an NSQ client may use as well
			if match && !listed && !errors.Is(err, names.ErrOpen) && !(identity && names.Wildcards(filter)) {
				t.Fatalf("%s%q: filter %q has the topics %q, and misses %q", text, name, filter, topics, target.Topic)
			}
			if complete && listed && !match && !identity {
				t.Fatalf("%s%q: filter %q is complete for %q", text, name, filter, topics)
			}
		}
	})
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(fleet))
	f.Add([]byte(rule("a/+/#", "t-{1}", "{1}{2}")))
	f.Add([]byte("[[mqtt]]\nfilter = \"#\"\ntopic = \"all\"\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		rules, err := names.Parse(text)
		if err != nil {
			return
		}
		for _, name := range []string{"a", "a/b/c", "fleet/x/telemetry", "/", "$SYS"} {
			if target, _, ok := rules.Map([]byte(name), nil); ok && !wire.ValidTopicName(target.Topic) {
				t.Errorf("%q maps to %q", name, target.Topic)
			}
			topics, _ := rules.Topics(name, names.MaxRules)
			for _, topic := range topics {
				if !wire.ValidTopicName(topic) {
					t.Errorf("%q has the topic %q", name, topic)
				}
			}
		}
	})
}

func TestClientChannel(t *testing.T) {
	seen := map[string]string{}
	for _, id := range []string{
		"sensor-7", "a", strings.Repeat("x", 49), strings.Repeat("x", 50), strings.Repeat("x", 59), strings.Repeat("x", 60),
		strings.Repeat("x", 256), "with space", "ü", "x#ephemeral", "#ephemeral", "_0123456789abcdef", "a/b", "a/c",
	} {
		for _, ephemeral := range []bool{false, true} {
			channel := names.ClientChannel(id, ephemeral)
			if other := seen[channel]; other != "" {
				t.Errorf("%q and %q have the channel %q", id, other, channel)
			}
			seen[channel] = id
			if !wire.ValidChannelName(channel) || wire.Ephemeral(channel) != ephemeral {
				t.Errorf("%q has the channel %q", id, channel)
			}
		}
	}
	testkit.Equal(t, names.ClientChannel("sensor-7", false), "mqtt.sensor-7")
	testkit.Equal(t, names.ClientChannel("sensor-7", true), "mqtt.sensor-7#ephemeral")
}

func TestMapDoesNotAllocate(t *testing.T) {
	rules := parse(t, fleet)
	name, scratch := []byte("tenants/acme/dev-1/temperature"), make([]byte, 0, 64)
	if got := testing.AllocsPerRun(100, func() {
		if _, _, ok := rules.Map(name, scratch); !ok {
			t.Fatal("not mapped")
		}
	}); got > 0 {
		t.Errorf("%v allocations", got)
	}
}

func BenchmarkMap(b *testing.B) {
	for _, count := range []int{1, 16, 256} {
		b.Run(fmt.Sprint(count), func(b *testing.B) {
			text := ""
			for i := range count - 1 {
				text += rule(fmt.Sprintf("site-%d/+/telemetry", i), "t", "{1}")
			}
			rules := parse(b, text+rule("fleet/+/telemetry", "telemetry", "{1}"))
			name, scratch := []byte("fleet/truck-17/telemetry"), make([]byte, 0, 64)
			for b.Loop() {
				rules.Map(name, scratch)
			}
		})
	}
}
