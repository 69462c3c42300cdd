package web

import (
	"context"
	"errors"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/authz"
	"github.com/fairlead/fairlead/internal/lb/proxied/budget"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/mark"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/lb/proxied/traffic"
)

// Bounds of authorization.
const (
	// askTime is how long an authorization server has, and a client for the body that this server gets.
	askTime = 10 * time.Second
	// firstPart is how much memory a body has at first, in bytes. It gets more as it comes.
	firstPart = 4 << 10
)

var errSlow = errors.New("the body does not come in time")

// authorize asks whether the request may go to a Pod. If it may not, the client has the answer: whole is as of carry. Without an
// answer of the server no request passes.
func authorize(x *exchange, q *authz.Question, at *proxied.Config) (passes, whole bool) {
	var body []byte
	if most := q.MaxBody(); most > 0 {
		var err error
		if body, err = gather(x, most); err != nil {
			return false, x.failed(err)
		}
	}
	answer, err := inquire(x, q, at, body)
	x.touch()
	count := x.config.Traffic().Authorized
	if errors.Is(err, errLeft) {
		return false, x.failed(err)
	}
	var no *authz.Refusal
	if err == nil {
		no, err = q.Judge(answer)
	}
	if err != nil {
		count(traffic.Undecided)
		x.trace.Decided("the authorization server " + at.Destination().String() + " has not answered: " + err.Error())
		log := x.engine.host.Log().Debug
		if x.engine.asks.Due() {
			log = x.engine.host.Log().Warn
		}
		log("cannot ask an authorization server; the request is refused", "service", x.config.Service, "server", at.Destination(), "err", err)
		refuse(x, q.Failed())
		return false, true
	}
	if no != nil {
		count(traffic.Denied)
		x.trace.Decided("the authorization server " + at.Destination().String() + " does not let the request pass")
		refuse(x, no)
		return false, true
	}
	count(traffic.Allowed)
	q.Pass(x.req, answer)
	if also := q.Edit(answer); also != nil {
		first := x.edit
		x.edit = func(r *http1.Response) {
			if first != nil {
				first(r)
			}
			also(r)
		}
	}
	return true, true
}

func refuse(x *exchange, r *authz.Refusal) {
	x.reply(&proxied.Reply{Status: r.Status, Fields: r.Fields, Body: r.Body})
}

// gathered is the client of a request whose body is read before a Pod gets it: from then on it comes from here.
type gathered struct {
	client
	x     *exchange
	first *http1.Request // its bytes end with its head
	until time.Time
	most  int
	body  []byte     // repeats counts its capacity
	from  wireSource // how much of it has not been taken
}

// gather reads the body of the request. ungather follows once the request is over.
func gather(x *exchange, most int) ([]byte, error) {
	from := x.client.source()
	if from.done() {
		return nil, nil
	}
	if x.most > 0 {
		most = int(min(x.most, int64(most)))
	}
	if x.req.Length > int64(most) {
		return nil, errBody
	}
	if x.req.Length >= 0 {
		most = int(x.req.Length)
	}
	g := &gathered{client: x.client, x: x, first: x.req, until: time.Now().Add(x.engine.askTime), most: most}
	x.client, x.req = g, x.req.Clone()
	if err := g.grow(min(most, firstPart)); err != nil {
		return nil, err
	}
	if g.first.Continue {
		x.hasInterim = true
		if err := g.proceed(); err != nil {
			return nil, err
		}
	}
	p := pump{to: g, from: from, timeout: x.limit(), bytes: &x.received, most: int64(most), of: g}
	if err := p.run(x.poll()); err != nil {
		if errors.Is(err, http1.ErrMalformed) {
			x.conn.malformed.Store(true)
		}
		return nil, err
	}
	x.req.Length = int64(len(g.body))
	g.from.body = x.req.Body()
	return g.body, nil
}

// ungather gives the request its client back, and what is kept of its body.
func ungather(x *exchange, c client) {
	if g, is := x.client.(*gathered); is {
		x.engine.repeats.Add(-int64(cap(g.body)))
		x.req = g.first
	}
	x.client = c
}

func (g *gathered) source() source             { return &g.from }
func (g *gathered) whole(int) ([]byte, bool)   { return g.body, true }
func (g *gathered) takeWhole(n int)            { g.from.body.Skip(uint64(n)) } //nolint:gosec // the length of body
func (g *gathered) flush() error               { return nil }
func (g *gathered) pending() bool              { return false }
func (g *gathered) finish([]http1.Field) error { return nil }
func (g *gathered) touch()                     { g.x.touch() }

func (g *gathered) add(data []byte, _ bool) error {
	if n := len(g.body) + len(data); n > g.most {
		return errBody
	} else if n > cap(g.body) {
		if err := g.grow(min(g.most, max(n, 2*cap(g.body)))); err != nil {
			return err
		}
	}
	g.body = append(g.body, data...)
	return g.late()
}

// grow gives the body so much memory: a client has only what it has sent, and as much again.
func (g *gathered) grow(to int) error {
	if !budget.AddUpTo(&g.x.engine.repeats, int64(to-cap(g.body)), repeatMemory) {
		return pods.ErrNone
	}
	g.body = append(make([]byte, 0, to), g.body...)
	return nil
}

func (g *gathered) waited() error {
	if err := g.late(); err != nil {
		return err
	}
	return g.x.waited()
}

// late bounds the time for the body, however often a part of it comes.
func (g *gathered) late() error {
	if time.Now().Before(g.until) {
		return nil
	}
	return errSlow
}

// asking is a question to an authorization server, and its client.
type asking struct {
	exchange
	internal
	of  *exchange // whom it is about
	got *authz.Answer
}

// inquire returns what a server answers about the request.
func inquire(x *exchange, q *authz.Question, at *proxied.Config, body []byte) (*authz.Answer, error) {
	from := clientConn{client: x.conn.client, at: x.conn.at, secure: x.conn.secure, tls: x.conn.tls, began: time.Now(), engine: x.engine}
	a := &asking{of: x}
	a.engine, a.conn, a.client = x.engine, &from, a
	a.req, body = q.Message(body, authz.Circumstances{
		Client: from.client, At: from.at, Subject: mark.Subject(&from.tls), ServerName: from.tls.ServerName, ID: x.id, Began: x.began,
		Second: x.second, Underscores: marksOf(x).Underscores,
	})
	a.link = &pods.Link{Close: a.drain}
	a.begin(at)
	defer a.leave()
	if x.id != "" {
		mark.SetField(a.req, []byte("X-Request-Id"), []byte(x.id))
	}
	marks := marksOf(&a.exchange)
	marks.Request(a.req, &from.tls)
	timer := time.AfterFunc(x.engine.askTime, a.drain)
	defer timer.Stop()
	stop := context.AfterFunc(x.engine.host.Context(), a.drain)
	defer stop()
	r := reaching{x: &a.exchange, t: transportOf(at)}
	err := r.deliver(body, true) // a question changes nothing, so it may be asked again
	if err != nil && (a.got == nil || !errors.Is(err, errEnough)) {
		return nil, err
	}
	return a.got, nil
}

func (a *asking) reply(*proxied.Reply) {}
func (a *asking) left() bool           { return a.of.client.left() }

func (a *asking) answer(source, string) sink {
	a.got = authz.NewAnswer(&a.res)
	return a
}

func (a *asking) add(data []byte, _ bool) error {
	if !a.got.Add(data) {
		return errEnough
	}
	return nil
}

func (a *asking) finish(trailers []http1.Field) error {
	a.got.End(trailers)
	return nil
}
