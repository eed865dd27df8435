package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/testkit"
)

// busy has topics with every property that top can show.
type busy struct {
	admin
	topics []*srtmv1.Topic
}

func (b *busy) ListTopics(context.Context, *srtmv1.ListTopicsRequest) (*srtmv1.ListTopicsResponse, error) {
	return &srtmv1.ListTopicsResponse{Topics: append(b.topics, &srtmv1.Topic{Spec: &srtmv1.TopicSpec{Name: "gone"}}), NextPageToken: "more"}, nil
}

func (b *busy) GetTopic(_ context.Context, r *srtmv1.GetTopicRequest) (*srtmv1.GetTopicResponse, error) {
	for _, t := range b.topics {
		if t.Spec.Name == r.Name {
			return &srtmv1.GetTopicResponse{Topic: t}, nil
		}
	}
	return nil, status.Errorf(codes.NotFound, "no topic %q", r.Name)
}

func TestTop(t *testing.T) {
	met, missed := topic(), topic()
	b := met.Status.Brokers[0]
	b.Last = &srtmv1.TopicStats{Interval: durationpb.New(2 * time.Second), Offered: 12_000, Released: 11_999, Delivered: 11_000, Backlog: 3, Depth: 7}
	met.Status.Brokers = append(met.Status.Brokers, b)
	no := false
	missed.Spec.Name, missed.Status.SloMet = "late", &no
	few := topic()
	few.Spec.Name, few.Status.SloMet = "few", nil
	address := serve(t, &busy{topics: []*srtmv1.Topic{{Spec: &srtmv1.TopicSpec{Name: "idle"}}, few, met, missed}})
	for _, form := range []string{"json", "table"} {
		out, _, err := srtm(t, address, "top", "--limit=5", "--output", form)
		testkit.Must(t, err)
		testkit.Golden(t, filepath.Join("testdata", "top."+form), []byte(out))
	}
	out, _, err := srtm(t, address, "top", "late", "--count=2", "--interval=100ms")
	if err != nil || strings.Count(out, "1 topic, 1 outside") != 2 || strings.Contains(out, "idle") {
		t.Errorf("%v\n%s", err, out)
	}
	if _, _, err := srtm(t, address, "top", "gone"); err == nil {
		t.Error("a topic that is not there was shown")
	}
	out, _, err = srtm(t, address, "topic", "watch", "sensors", "--count=2", "--interval=100ms", "--output=json")
	if d := json.NewDecoder(strings.NewReader(out)); err != nil || d.Decode(&struct{}{}) != nil || d.Decode(&struct{}{}) != nil || d.Decode(&struct{}{}) != io.EOF {
		t.Errorf("%v\n%s", err, out)
	}
	for _, args := range [][]string{{"top", "--limit=0"}, {"top", "--interval=1ms"}, {"topic", "watch"}, {"topic", "watch", "t", "--count=-1"}} {
		if _, _, err := srtm(t, address, args...); !errors.As(err, new(program.UsageError)) {
			t.Errorf("%q: %v", args, err)
		}
	}
}

// A failed refresh keeps the last view, and the next refresh may succeed.
func TestRefresh(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		var out testkit.Buffer
		cmd := &cobra.Command{}
		cmd.SetOut(&out)
		cmd.SetContext(t.Context())
		r := refresh{every: time.Second, count: 3}
		x := &call{cli: &cli{output: formTable, timeout: time.Second}, cmd: cmd, progress: startProgress(cmd, "")}
		n := 0
		look := func(_ context.Context, w io.Writer) error {
			n++
			if n == 2 {
				return errors.New("no server answers")
			}
			_, err := fmt.Fprintln(w, "look", n)
			return err
		}
		testkit.Must(t, r.run(x, look))
		lines := strings.Split(out.String(), "\n")
		if len(lines) != 6 || lines[0] != "look 1" || lines[1] != "look 1" || !strings.HasSuffix(lines[3], ": no server answers") || lines[4] != "look 3" {
			t.Errorf("%q", lines)
		}
		n = 1
		if err := r.run(x, look); err == nil {
			t.Error("the first look failed, and the command did not")
		}
	})
}

func TestCompletion(t *testing.T) {
	a := &admin{}
	at := "--loaddistributor-address=" + serve(t, a)
	for _, c := range []struct {
		words string
		want  []string
	}{
		{"topic describe", []string{"sensors", ":4"}},
		{"top sensors", []string{"sensors", ":4"}},
		{"pub", []string{"sensors", ":4"}},
		{"pub sensors", []string{":0"}},
		{"broker drain", []string{"b1", "b2", ":4"}},
		{"broker drain b1", []string{":4"}},
		{"topic create", []string{":4"}},
		{"channel pause sensors", []string{"alerts", "billing", ":4"}},
		{"channel seek", []string{"sensors", ":4"}},
		{"tail sensors --channel", []string{"alerts", "billing", ":4"}},
		{"topic move sensors --to", []string{"b1", "b2", ":4"}},
		{"topic create t --over-limit", []string{"delay", "reject", ":4"}},
		{"topic list --output", []string{"table", "json", ":4"}},
		{"broker list", []string{":4"}},
	} {
		words := strings.Fields(c.words)
		if last := words[len(words)-1]; strings.HasPrefix(last, "--") { // the test requests completions of the flag's value
			words = append(words[:len(words)-1], at, last, "")
		} else {
			words = append(words, at, "")
		}
		out, _, err := srtm(t, "", slices.Concat([]string{"__complete"}, words)...)
		got := strings.Fields(out)
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, %v, want %q", c.words, got, err, c.want)
		}
	}
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if out, _, err := srtm(t, "", "completion", shell); err != nil || !strings.Contains(out, "__complete") {
			t.Errorf("%s: %v", shell, err)
		}
	}
}
