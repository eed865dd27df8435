package names

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/BurntSushi/toml"

	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/nsq/wire"
)

// Limits of a rules file. A publish compares its name with each rule until a rule matches.
const (
	MaxRulesSize = 1 << 20 // bytes
	MaxRules     = 256
	MaxCaptures  = 8 // wildcards of a filter that templates may refer to
)

// Errors of Topics.
var (
	ErrNoTopic = errors.New("no rule maps names of the filter to a topic, and the filter is no topic name")
	ErrOpen    = errors.New("a rule takes the topic from a wildcard of the filter, so the topics are not known")
	ErrTooMany = errors.New("the filter selects messages of more topics than it may")
)

// Rules map MQTT topic names to SRTM topics. The first rule that matches wins. A name without a rule
// that is a valid SRTM topic name maps to itself. The zero Rules has no rule. Rules do not change.
type Rules struct {
	rules []rule
}

type rule struct {
	filter    string
	topic     template
	publisher template // empty: the connection's identity
	envelope  bool
}

// Parse reads a rules file and returns all faults of the file at once.
func Parse(text []byte) (*Rules, error) {
	var file struct {
		MQTT []struct {
			Filter    string `toml:"filter"`
			Topic     string `toml:"topic"`
			Publisher string `toml:"publisher"`
			Envelope  string `toml:"envelope"`
		} `toml:"mqtt"`
	}
	if len(text) > MaxRulesSize {
		return nil, fmt.Errorf("%d bytes of rules are more than %d", len(text), MaxRulesSize)
	}
	meta, err := toml.Decode(string(text), &file)
	if err != nil {
		return nil, err
	}
	var errs faults.List
	for _, key := range meta.Undecoded() {
		errs.If(true, "unknown key %s", key)
	}
	if len(file.MQTT) > MaxRules {
		return nil, fmt.Errorf("%d rules are more than %d", len(file.MQTT), MaxRules)
	}
	rules := &Rules{}
	for i, entry := range file.MQTT {
		where := fmt.Sprintf("rule %d (filter %q)", i+1, entry.Filter)
		r := rule{filter: entry.Filter, envelope: entry.Envelope != ""}
		if err := CheckFilter(r.filter); err != nil {
			errs.Add(fmt.Errorf("%s: the filter %w", where, err))
			continue
		}
		errs.If(strings.HasPrefix(r.filter, "$share/"), "%s: a rule has no $share", where)
		wild := wildcards(r.filter)
		r.topic, err = parseTemplate(entry.Topic, len(wild))
		if err == nil {
			err = r.topic.checkTopic(wild)
		}
		if err != nil {
			errs.Add(fmt.Errorf("%s: topic %q %w", where, entry.Topic, err))
		}
		if r.publisher, err = parseTemplate(entry.Publisher, len(wild)); err != nil {
			errs.Add(fmt.Errorf("%s: publisher %q %w", where, entry.Publisher, err))
		}
		errs.If(r.envelope && entry.Envelope != "cloudevents", "%s: envelope %q is not %q", where, entry.Envelope, "cloudevents")
		earlier := slices.IndexFunc(rules.rules, func(other rule) bool { return Covers(other.filter, r.filter) })
		if earlier >= 0 {
			errs.Add(fmt.Errorf("%s never applies: the earlier filter %q matches the same names", where, rules.rules[earlier].filter))
		}
		rules.rules = append(rules.rules, r)
	}
	if err := errs.Err(); err != nil {
		return nil, err
	}
	return rules, nil
}

// Target is where the messages of an MQTT topic name go. Its slices refer to the rules, the name or the
// scratch.
type Target struct {
	Topic     []byte // SRTM topic
	Publisher []byte // identity of the publisher; empty: the connection's identity
	Envelope  bool   // NSQ consumers get a CloudEvents envelope
}

// Map returns the target of a valid topic name. Values that Map has to compose are appended to
// scratch, which Map returns. If the name has no SRTM topic, ok is false.
func (r *Rules) Map(name, scratch []byte) (t Target, grown []byte, ok bool) {
	for i := range r.rules {
		rule := &r.rules[i]
		if !Match(rule.filter, name) {
			continue
		}
		var values captures
		if rule.topic.captures || rule.publisher.captures {
			capture(rule.filter, name, &values)
		}
		t.Envelope = rule.envelope
		t.Topic, scratch = rule.topic.expand(scratch, &values)
		t.Publisher, scratch = rule.publisher.expand(scratch, &values)
		return t, scratch, !rule.topic.captures || wire.ValidTopicName(t.Topic) // Parse has checked a constant topic
	}
	return Target{Topic: name}, scratch, wire.ValidTopicName(name)
}

// Topics returns the SRTM topics that may have messages whose names match a valid filter, in the order
// of the rules. Errors: ErrNoTopic, ErrOpen, and ErrTooMany with more than limit topics.
func (r *Rules) Topics(filter string, limit int) ([]string, error) {
	var topics []string
	add := func(topic string) {
		if !slices.Contains(topics, topic) {
			topics = append(topics, topic)
		}
	}
	for i := range r.rules {
		rule := &r.rules[i]
		if !Overlap(rule.filter, filter) {
			continue
		}
		topic, known := rule.topicOf(filter)
		if !known {
			return nil, fmt.Errorf("filter %q: %w", filter, ErrOpen)
		}
		if wire.ValidTopicName(topic) {
			add(topic)
		}
		if len(topics) > limit {
			return nil, fmt.Errorf("filter %q: %w", filter, ErrTooMany)
		}
		if Covers(rule.filter, filter) { // no name of the filter reaches a later rule
			if len(topics) == 0 {
				return nil, fmt.Errorf("filter %q: %w", filter, ErrNoTopic)
			}
			return topics, nil
		}
	}
	if wire.ValidTopicName(filter) {
		add(filter)
	}
	switch {
	case len(topics) == 0:
		return nil, fmt.Errorf("filter %q: %w", filter, ErrNoTopic)
	case len(topics) > limit:
		return nil, fmt.Errorf("filter %q: %w", filter, ErrTooMany)
	}
	return topics, nil
}

// Complete reports whether the filter selects all messages that the rules put into the topics.
func (r *Rules) Complete(filter string, topics []string) bool {
	for _, topic := range topics {
		for i := range r.rules {
			rule := &r.rules[i]
			if !rule.topic.mayBe(topic) {
				continue
			}
			names := rule.filter
			if rule.topic.captures {
				// If the filter fixes the topic, the rule's names with this topic have the filter's levels.
				if fixed, known := rule.topicOf(filter); !known || fixed != topic || !Overlap(rule.filter, filter) {
					return false
				}
				names = rule.fix(filter)
			}
			if !Covers(filter, names) {
				return false
			}
		}
	}
	return true
}

// topicOf returns the topic of the names that match both the rule and the filter. If the topic depends on
// a wildcard of the filter, known is false. Requires: the filters overlap, or captures is false.
func (r *rule) topicOf(filter string) (topic string, known bool) {
	if !r.topic.captures {
		return string(r.topic.text), true
	}
	var values captures
	capture(r.filter, []byte(filter), &values)
	for _, p := range r.topic.parts {
		if p.capture > 0 && (values[p.capture-1] == nil || Wildcards(string(values[p.capture-1]))) {
			return "", false
		}
	}
	expanded, _ := r.topic.expand(nil, &values)
	return string(expanded), true
}

// fix returns the rule's filter, with the wildcards that the topic refers to replaced by the levels of a
// filter.
func (r *rule) fix(filter string) string {
	levels, values := strings.Split(r.filter, "/"), strings.Split(filter, "/")
	number := 0
	for i, level := range levels {
		if level != "+" && level != "#" {
			continue
		}
		number++
		if slices.ContainsFunc(r.topic.parts, func(p part) bool { return p.capture == number }) {
			levels[i] = values[i]
		}
	}
	return strings.Join(levels, "/")
}

// wildcards returns the wildcards of a filter in their order.
func wildcards(filter string) (wild []byte) {
	for level := range strings.SplitSeq(filter, "/") {
		if level == "+" || level == "#" {
			wild = append(wild, level[0])
		}
	}
	return wild
}

// captures are the levels at the first wildcards of a filter; nil: the name has fewer levels.
type captures [MaxCaptures][]byte

// capture sets values to the levels of name at the wildcards of filter. # captures the rest of the name.
func capture(filter string, name []byte, values *captures) {
	number, start := 0, 0
	for i := 0; i < len(filter) && start <= len(name) && number < MaxCaptures; i++ { // i is the start of a level
		end := start
		for end < len(name) && name[end] != '/' {
			end++
		}
		switch filter[i] {
		case '#':
			values[number] = name[start:]
			return
		case '+':
			values[number] = name[start:end:end]
			number++
		}
		for i < len(filter) && filter[i] != '/' {
			i++
		}
		start = end + 1
	}
}

// template is a text with references {1}, {2} to the wildcards of a rule's filter.
type template struct {
	text     []byte // the whole text, if captures is false
	captures bool
	parts    []part
}

// part is a literal text or a reference.
type part struct {
	text    string
	capture int // number of the wildcard; 0: text
}

func parseTemplate(text string, wildcards int) (template, error) {
	t := template{text: []byte(text)}
	for text != "" {
		before, rest, found := strings.Cut(text, "{")
		if strings.Contains(before, "}") {
			return t, errors.New("has } without {")
		}
		if before != "" {
			t.parts = append(t.parts, part{text: before})
		}
		if !found {
			break
		}
		number, after, closed := strings.Cut(rest, "}")
		n, err := strconv.Atoi(number)
		if !closed || err != nil || n < 1 || n > min(wildcards, MaxCaptures) {
			return t, fmt.Errorf("refers to {%s}, but the filter has %d wildcards (at most %d count)", number, wildcards, MaxCaptures)
		}
		t.parts = append(t.parts, part{capture: n})
		t.captures, text = true, after
	}
	return t, nil
}

// checkTopic returns what is wrong with the template of a topic.
func (t *template) checkTopic(wild []byte) error {
	sample := ""
	for _, p := range t.parts {
		if p.capture > 0 && wild[p.capture-1] == '#' {
			return fmt.Errorf("refers to {%d}, but # may stand for several levels", p.capture)
		}
		if sample += p.text; p.capture > 0 {
			sample += "x"
		}
	}
	if !wire.ValidTopicName(sample) {
		return errors.New("is not a valid SRTM topic name")
	}
	return nil
}

// expand returns the text for the captured values. It appends a composed text to scratch.
func (t *template) expand(scratch []byte, values *captures) (text, grown []byte) {
	switch {
	case !t.captures:
		return t.text, scratch
	case len(t.parts) == 1:
		return values[t.parts[0].capture-1], scratch
	}
	start := len(scratch)
	for _, p := range t.parts {
		scratch = append(scratch, p.text...)
		if p.capture > 0 {
			scratch = append(scratch, values[p.capture-1]...)
		}
	}
	return scratch[start:len(scratch):len(scratch)], scratch
}

// mayBe reports whether the template may expand to text. It ignores the parts between the first and the
// last.
func (t *template) mayBe(text string) bool {
	if !t.captures {
		return string(t.text) == text
	}
	return strings.HasPrefix(text, t.parts[0].text) && strings.HasSuffix(text, t.parts[len(t.parts)-1].text)
}
