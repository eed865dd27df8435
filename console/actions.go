package console

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/internal/topics"
)

// actionTimeout bounds an action.
const actionTimeout = 30 * time.Second

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// operator carries out the changes of pages.
type operator struct {
	admin   srtmv1.AdminServiceClient // nil: of a standalone broker
	brokers *requester
}

// action is what a button does.
type action struct {
	run func(context.Context, url.Values) (message string, err error)
	// check returns the faults of the form, before the question; nil: the form cannot have faults.
	check func(url.Values) error
	// question is asked before; nil: none.
	question func(url.Values) string
	// nextPage returns the page to show afterwards; nil: the same page.
	nextPage func(url.Values) string
}

// actions returns the actions of pages by name.
func (c *Console) actions() map[string]action {
	o := operator{c.admin, &c.requester}
	onHolders := func(verb, path string, keys ...string) func(context.Context, url.Values) (string, error) {
		return func(ctx context.Context, form url.Values) (string, error) {
			q := url.Values{}
			for _, key := range keys {
				q.Set(key, form.Get(key))
			}
			return o.onHolders(ctx, form, path, q, verb)
		}
	}
	ask := func(format string, keys ...string) func(url.Values) string {
		return func(form url.Values) string {
			var names []any
			for _, key := range keys {
				names = append(names, form.Get(key))
			}
			return fmt.Sprintf(format, names...)
		}
	}
	pauseTopic := "Pause topic %s? The topic accepts messages, and keeps them from all its channels."
	if c.admin != nil {
		pauseTopic += " A broker that gets the topic later does not pause it."
	}
	all := map[string]action{
		"pause":         {run: onHolders("Paused", "/channel/pause", "topic", "channel")},
		"unpause":       {run: onHolders("Resumed", "/channel/unpause", "topic", "channel")},
		"empty":         {run: onHolders("Emptied", "/channel/empty", "topic", "channel"), question: ask("Discard all messages of channel %s?", "channel")},
		"pause-topic":   {run: onHolders("Paused", "/topic/pause", "topic"), question: ask(pauseTopic, "topic")},
		"unpause-topic": {run: onHolders("Resumed", "/topic/unpause", "topic")},
		"empty-topic":   {run: onHolders("Emptied", "/topic/empty", "topic"), question: ask("Discard the messages that wait in topic %s itself? Its channels keep their messages.", "topic")},
		"seek":          {run: o.seek, check: checkPlace, question: ask("Move channel %s to %s? Messages in flight no longer belong to it.", "channel", "to")},
		"publish":       {run: o.publish, check: checkMessage},
	}
	if c.admin == nil {
		return all
	}
	all["drain"] = action{run: o.drain, question: func(form url.Values) string {
		switch {
		case form.Get("undo") != "":
			return ""
		case form.Get("force") != "":
			return fmt.Sprintf("Force the drain of %s? Topics that fit nowhere else overload other brokers. Messages that no consumer takes are lost.", form.Get("broker"))
		}
		return fmt.Sprintf("Drain %s? Its topics move to other brokers.", form.Get("broker"))
	}}
	all["delete"] = action{question: ask("Delete topic %s with all its messages, on all brokers?", "topic"), nextPage: func(form url.Values) string {
		return query("/ui/topics", "deleted", form.Get("topic"))
	}, run: func(ctx context.Context, form url.Values) (string, error) {
		_, err := c.admin.DeleteTopic(ctx, &srtmv1.DeleteTopicRequest{Name: form.Get("topic")})
		return "The topic was deleted.", err
	}}
	all["contract"] = action{run: o.changeContract, check: checkContract, question: ask("Change the contract of topic %s?", "topic")}
	all["channel"] = action{run: func(ctx context.Context, form url.Values) (string, error) {
		_, err := c.admin.CreateChannel(ctx, &srtmv1.CreateChannelRequest{Topic: form.Get("topic"), Channel: form.Get("channel")})
		return "The channel was created.", err
	}}
	all["delete-channel"] = action{question: ask("Delete channel %s with all its messages?", "channel"), nextPage: func(form url.Values) string {
		return query("/ui/topic", "name", form.Get("topic"))
	}, run: func(ctx context.Context, form url.Values) (string, error) {
		_, err := c.admin.DeleteChannel(ctx, &srtmv1.DeleteChannelRequest{Topic: form.Get("topic"), Channel: form.Get("channel")})
		return "The channel was deleted.", err
	}}
	all["expiry"] = action{run: o.expire}
	all["tombstone"] = action{question: ask("Hide node %s from consumers of topic %s?", "node", "topic"), run: func(ctx context.Context, form url.Values) (string, error) {
		_, err := c.requester.ask(ctx, c.cfg.Lookup, http.MethodPost, "lookup", "/topic/tombstone?"+url.Values{"topic": {form.Get("topic")}, "node": {form.Get("node")}}.Encode())
		return "The node is hidden from consumers of the topic for a while.", err
	}}
	return all
}

// drain begins or ends a drain.
func (o operator) drain(ctx context.Context, form url.Values) (string, error) {
	undo, force := form.Get("undo") != "", form.Get("force") != ""
	_, err := o.admin.DrainBroker(ctx, &srtmv1.DrainBrokerRequest{BrokerId: form.Get("broker"), Undo: undo, Force: force})
	if undo {
		return "The drain was undone. Topics can be placed on the broker again.", err
	}
	return "The drain has begun. This page shows what it waits for.", err
}

// onHolders sends a request to each connected broker that has the topic.
func (o operator) onHolders(ctx context.Context, form url.Values, path string, q url.Values, verb string) (string, error) {
	brokers, absent, err := o.brokers.holders(ctx, form.Get("topic"))
	if err != nil {
		return "", err
	}
	if err := errors.Join(each(brokers, func(_, address string) error {
		_, err := o.brokers.ask(ctx, o.brokers.transport, http.MethodPost, address, path+"?"+q.Encode())
		return err
	})...); err != nil {
		return "", &problem{http.StatusBadGateway, err.Error()}
	}
	text := fmt.Sprintf("%s on %s.", verb, plural.Count(len(brokers), "broker"))
	if absent != nil {
		text += " Disconnected, without a request: " + strings.Join(absent, ", ") + "."
	}
	return text, nil
}

// checkPlace checks where a seek goes.
func checkPlace(form url.Values) error {
	if _, ok := topics.ParsePlace(form.Get("to")); !ok {
		return &problem{http.StatusBadRequest, fmt.Sprintf("%.40q is no place. Write begin, end, an offset, or a time such as 2026-01-02T15:04:05Z.", form.Get("to"))}
	}
	return nil
}

// seek moves a channel to begin, end, a time or an offset.
func (o operator) seek(ctx context.Context, form url.Values) (string, error) {
	target := form.Get("to")
	if o.admin == nil {
		return o.onHolders(ctx, form, "/channel/seek", url.Values{"topic": {form.Get("topic")}, "channel": {form.Get("channel")}, "to": {target}}, "Moved")
	}
	place, _ := topics.ParsePlace(target) // checkPlace has checked it
	reply, err := o.admin.SeekChannel(ctx, &srtmv1.SeekChannelRequest{Topic: form.Get("topic"), Channel: form.Get("channel"), To: place})
	if err != nil {
		return "", err
	}
	for _, b := range reply.Brokers {
		if b.Reason != "" {
			return "", &problem{http.StatusBadGateway, fmt.Sprintf("Broker %s: %s: %s", b.BrokerId, b.Reason, b.Error)}
		}
	}
	return fmt.Sprintf("Moved on %s.", plural.Count(len(reply.Brokers), "broker")), nil
}

// act carries out the action of a form and reports the result. An action with a question
// needs the field sure: without it, act checks the form and asks.
func (c *Console) act(w http.ResponseWriter, r *http.Request) {
	name, u, form := r.PathValue("what"), userOf(r.Context()), r.PostForm
	chosen, found := c.actions()[name]
	if !found {
		c.fail(w, r, &problem{http.StatusNotFound, "There is no such action."})
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), actionTimeout)
	defer cancel()
	text, question, err := "", "", error(nil)
	if chosen.check != nil {
		err = chosen.check(form)
	}
	if err == nil && chosen.question != nil && form.Get("sure") == "" {
		question = chosen.question(form)
	}
	if err == nil && question == "" {
		text, err = chosen.run(ctx, form)
	}
	if question != "" {
		form.Set("sure", "yes")
		c.reply(w, r, "confirm", "Are you sure?", confirmation{name, question, form})
		return
	}
	var values []any
	for _, key := range []string{"topic", "channel", "broker", "node", "to", "undo", "force"} {
		if v := form.Get(key); v != "" {
			values = append(values, key, v)
		}
	}
	c.logAction(name, u, err, values...)
	script := r.Header.Get("Hx-Request") != ""
	switch {
	case err != nil && !script:
		c.fail(w, r, err)
	case err != nil:
		c.reply(w, r, "answer", "", [2]string{"bad", problemOf(err).text})
	case chosen.nextPage != nil && script:
		w.Header().Set("HX-Redirect", prefixOf(r)+chosen.nextPage(form))
	case chosen.nextPage != nil:
		http.Redirect(w, r, prefixOf(r)+chosen.nextPage(form), http.StatusSeeOther)
	case script:
		c.reply(w, r, "answer", "", [2]string{"good", text})
	default:
		c.show(w, r, http.StatusOK, view{Template: "done", Title: "Done", Data: text})
	}
}

// confirmation is the question before an action, with the form that answers it.
type confirmation struct {
	What, Question string
	Form           url.Values
}

// reply answers a form with a template: a part of the page for scripts, otherwise a page.
func (c *Console) reply(w http.ResponseWriter, r *http.Request, template, title string, data any) {
	v := view{Template: template, Title: title, Data: data}
	if r.Header.Get("Hx-Request") == "" {
		c.show(w, r, http.StatusOK, v)
		return
	}
	out, err := c.render(template, frame{view: v, User: userOf(r.Context())})
	if err != nil {
		c.fail(w, r, err)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	_, _ = w.Write([]byte(below(prefixOf(r), out))) // the reader has left
}

// logAction logs an action and its user.
func (c *Console) logAction(action string, u user, err error, values ...any) {
	attributes := append([]any{"action", action, "by", u.Name}, values...)
	if err != nil {
		c.cfg.Log.Warn("console action failed", append(attributes, obs.KeyError, problemOf(err).text)...)
		return
	}
	c.cfg.Log.Info("console action", attributes...)
}
