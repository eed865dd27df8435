package console

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"time"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/topics"
)

// actionTimeout bounds an action.
const actionTimeout = 30 * time.Second

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// actions returns the actions of pages by name. Each action returns its answer.
func (c *Console) actions() map[string]func(context.Context, url.Values) (string, error) {
	onChannel := func(path, done string) func(context.Context, url.Values) (string, error) {
		return func(ctx context.Context, form url.Values) (string, error) {
			return c.onHolders(ctx, form, path, url.Values{"topic": {form.Get("topic")}, "channel": {form.Get("channel")}}, done)
		}
	}
	all := map[string]func(context.Context, url.Values) (string, error){
		"pause":   onChannel("/channel/pause", "Paused"),
		"unpause": onChannel("/channel/unpause", "Goes on"),
		"empty":   onChannel("/channel/empty", "Emptied"),
		"seek":    c.seek,
	}
	if c.admin == nil {
		return all
	}
	all["drain"] = func(ctx context.Context, form url.Values) (string, error) {
		_, err := c.admin.DrainBroker(ctx, &srtmv1.DrainBrokerRequest{BrokerId: form.Get("broker"), Undo: form.Get("undo") != ""})
		if form.Get("undo") != "" {
			return "The broker is placed on again.", err
		}
		return "The broker drains: what it has moves to others.", err
	}
	all["delete"] = func(ctx context.Context, form url.Values) (string, error) {
		_, err := c.admin.DeleteTopic(ctx, &srtmv1.DeleteTopicRequest{Name: form.Get("topic")})
		return "The topic was deleted.", err
	}
	all["expiry"] = c.expire
	all["tombstone"] = func(ctx context.Context, form url.Values) (string, error) {
		_, err := c.ask(ctx, c.cfg.Lookup, http.MethodPost, "lookup", "/topic/tombstone?"+url.Values{"topic": {form.Get("topic")}, "node": {form.Get("node")}}.Encode())
		return "The node is hidden from consumers of the topic for a while.", err
	}
	return all
}

// onHolders sends a request to each broker that has the topic.
func (c *Console) onHolders(ctx context.Context, form url.Values, path string, q url.Values, done string) (string, error) {
	found, err := c.holders(ctx, form.Get("topic"))
	if err != nil {
		return "", err
	}
	if err := errors.Join(each(found, func(_, address string) error {
		_, err := c.ask(ctx, c.cfg.Brokers, http.MethodPost, address, path+"?"+q.Encode())
		return err
	})...); err != nil {
		return "", &problem{http.StatusBadGateway, err.Error()}
	}
	return fmt.Sprintf("%s on %d of %d brokers.", done, len(found), len(found)), nil
}

// seek moves a channel to begin, end, a time or an offset.
func (c *Console) seek(ctx context.Context, form url.Values) (string, error) {
	to := form.Get("to")
	if c.admin == nil {
		return c.onHolders(ctx, form, "/channel/seek", url.Values{"topic": {form.Get("topic")}, "channel": {form.Get("channel")}, "to": {to}}, "Moved")
	}
	place, ok := topics.ParsePlace(to)
	if !ok {
		return "", &problem{http.StatusBadRequest, "Where to: begin, end, an offset, or a time such as 2026-01-02T15:04:05Z."}
	}
	reply, err := c.admin.SeekChannel(ctx, &srtmv1.SeekChannelRequest{Topic: form.Get("topic"), Channel: form.Get("channel"), To: place})
	if err != nil {
		return "", err
	}
	for _, b := range reply.Brokers {
		if b.Reason != "" {
			return "", &problem{http.StatusBadGateway, fmt.Sprintf("Broker %s: %s: %s", b.BrokerId, b.Reason, b.Error)}
		}
	}
	return fmt.Sprintf("Moved on %d brokers.", len(reply.Brokers)), nil
}

// act carries out the action of a form and reports the result.
func (c *Console) act(w http.ResponseWriter, r *http.Request) {
	name, u := r.PathValue("what"), userOf(r.Context())
	do, known := c.actions()[name]
	if !known {
		c.fail(w, r, &problem{http.StatusNotFound, "There is no such action."})
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), actionTimeout)
	defer cancel()
	text, err := do(ctx, r.PostForm)
	var what []any
	for _, key := range []string{"topic", "channel", "broker", "node", "to", "undo"} {
		if v := r.PostForm.Get(key); v != "" {
			what = append(what, key, v)
		}
	}
	c.told(name, u, err, what...)
	if r.Header.Get("Hx-Request") == "" { // without scripts
		if err != nil {
			c.fail(w, r, err)
			return
		}
		c.show(w, r, http.StatusOK, view{Template: "done", Title: "Done", Data: text})
		return
	}
	class := "good"
	if err != nil {
		text, class = problemOf(err).text, "bad"
	}
	out, err := c.render("answer", frame{view: view{Data: [2]string{class, text}}})
	if err != nil {
		c.fail(w, r, err)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	_, _ = w.Write([]byte(out)) // the reader has left
}

// told logs an action and its user.
func (c *Console) told(action string, u user, err error, what ...any) {
	attributes := append([]any{"action", action, "by", u.Name}, what...)
	if err != nil {
		c.cfg.Log.Warn("console action failed", append(attributes, obs.KeyError, problemOf(err).text)...)
		return
	}
	c.cfg.Log.Info("console action", attributes...)
}
