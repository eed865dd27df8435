package mqtt

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/eclipse/paho.golang/paho"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// An envelope that is larger than --max-msg-size is refused, because logs and other brokers refuse it. An
// empty payload is a message. This is the same at the broker of the topic and at a broker that forwards. A
// name that does not fit into a record attribute is refused, and properties that do not fit are dropped and
// counted.
func TestSizesOfMessages(t *testing.T) {
	rules := filepath.Join(t.TempDir(), "rules.toml")
	testkit.Must(t, os.WriteFile(rules, []byte("[[mqtt]]\nfilter = \"wrapped/#\"\ntopic = \"wrapped\"\nenvelope = \"cloudevents\"\n\n[[mqtt]]\nfilter = \"plain/#\"\ntopic = \"plain\"\n"), 0o600))
	ports := localtest.Ports(t, 2)
	c := localtest.Start(t, 0, nil)
	for _, port := range ports {
		c.Join(t, "--mcap=1000", "--mqtt-address="+port, "--mqtt-rules="+rules, "--max-msg-size=2048", "--mqtt-max-packet-size=2048")
	}
	subscribers := []*device{connect(t, ports[0], "s0"), connect(t, ports[1], "s1")}
	for _, s := range subscribers {
		s.subscribe("wrapped/#", 1)
		s.subscribe("plain/#", 1)
	}
	binary := string(bytes.Repeat([]byte{0xff, 0}, 980)) // in Base64, larger than --max-msg-size
	for i, port := range ports {
		p := connect(t, port, "publisher")
		own := string(rune('a' + i))
		for _, rule := range []string{"wrapped/", "plain/"} {
			for name, payload := range map[string]string{"binary": binary, "empty": ""} {
				name = rule + name + own
				if rule == "wrapped/" && payload == binary {
					testkit.Equal(t, p.publish(name, payload, 1), 0x80, name)
					continue
				}
				testkit.Equal(t, p.publish(name, payload, 1), 0, name)
				for _, s := range subscribers {
					s.want(name + " " + payload)
				}
			}
			testkit.Equal(t, p.publish(rule+strings.Repeat("x", 300), "x", 1), 0x90, "a long name")
			user := paho.UserProperties{{Key: "key", Value: strings.Repeat("v", 300)}}
			_, err := p.Publish(t.Context(), &paho.Publish{Topic: rule + "properties" + own, QoS: 1, Properties: &paho.PublishProperties{User: user}})
			testkit.Must(t, err)
			for _, s := range subscribers {
				testkit.Equal(t, len((<-s.received).Properties.User), 0, "properties")
			}
		}
		ignored := testkit.Result(localtest.Metric(c.Brokers[i], "srtm_nsqd_mqtt_ignored_total")).Must(t)
		testkit.Equal(t, ignored, 2, "publishes without their properties")
	}
}
