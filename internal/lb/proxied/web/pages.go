package web

import (
	"errors"
	"net/http"

	"github.com/fairlead/fairlead/internal/gateway/policy"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/budget"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/pages"
)

// errReplaced means that an answer is dropped, and a page takes its place.
var errReplaced = errors.New("a page of the default backend takes the place of the answer")

// paged is a request whose answer a page may take the place of. Its methods do nothing for nil.
type paged struct {
	x      *exchange
	pages  *pages.Pages
	at     *proxied.Config
	head   *http1.Request // the bytes of x.req end with its head; nil unless a body is uploaded
	memory int            // of head, counted
	lost   bool           // there was no memory for head
	asked  bool           // the page is asked for: its answer stays
	left   bool           // the client may still send something of its body
	status int            // of the answer that is dropped
}

// keep keeps the head before a body is read.
func (p *paged) keep() {
	if p == nil || p.head != nil {
		return
	}
	n := sizeOf(p.x.req)
	if p.lost = !budget.AddUpTo(&p.x.engine.repeats, int64(n), repeatMemory); !p.lost {
		p.head, p.memory = p.x.req.Clone(), n
	}
}

// end is the last call.
func (p *paged) end() { p.x.engine.repeats.Add(-int64(p.memory)) }

// unread reports whether the client may still send something of a body that nobody reads.
func (p *paged) unread() bool { return p != nil && p.left }

// takes decides whether a page takes the place of the answer of a Pod.
func (p *paged) takes(r *http1.Response) bool {
	if p == nil || p.asked || !p.pages.Has(r.Status, false) {
		return false
	}
	p.status = r.Status
	p.pages.Drop(r)
	return true
}

// owed returns the status of the answer that a page is to take the place of after err, 0 for none.
func (p *paged) owed(err error) int {
	x := p.x
	if errors.Is(err, errReplaced) {
		return p.status
	}
	if x.answering || p.lost || x.drained.Load() || errors.Is(err, errLeft) || policy.Over(x.deadline) {
		return 0
	}
	status := statusOf(x, err)
	if status < http.StatusBadGateway || !p.pages.Has(status, true) {
		return 0
	}
	return status
}

// replace has the default backend answer after err, once. It reports whether the client has an answer by that, and whole is as of carry.
func (p *paged) replace(err error) (replaced, whole bool) {
	if p == nil || err == nil {
		return false, false
	}
	x, status := p.x, p.owed(err)
	if status == 0 {
		return false, false
	}
	if p.lost { // what the page hides is not shown for want of memory
		x.reply(&proxied.Reply{Status: status, Fields: p.pages.Logins(status)})
		return true, true
	}
	req, client, upload := x.req, x.client, x.upload
	defer func() { x.req, x.client, x.upload = req, client, upload }()
	p.asked, p.left, x.forPage = true, !client.source().done(), true
	head := p.head
	if head == nil {
		head = req
	}
	x.req, x.client, x.upload, x.to = p.pages.Request(head, status), bodiless{client}, nil, p.at
	x.copied, x.again, x.held, x.cookies, x.websocket = nil, nil, nil, nil, false
	x.edit = p.pages.Edit(x.edit)
	x.touch()
	x.search = reaching{x: x, t: transportOf(x.to)}
	err = x.search.deliver(nil, true)
	x.leave()
	switch {
	case err == nil:
		return true, true
	case x.answering && client.begun():
		return true, false
	case errors.Is(err, errLeft):
		x.status = statusLeft
		return true, false
	}
	x.engine.host.Log().Debug("no page for an answer", "service", x.config.Service, "server", x.to.Destination(), "status", status, "err", err)
	x.trace.Decided("the default backend " + x.to.Destination().String() + " has not answered: " + err.Error())
	x.client = client
	x.reply(&proxied.Reply{Status: status, Fields: p.pages.Logins(status)})
	return true, true
}

// bodiless is the client of a request that goes on without its body.
type bodiless struct{ client }

func (bodiless) source() source           { return nothing }
func (bodiless) whole(int) ([]byte, bool) { return nil, false }
func (bodiless) takeWhole(int)            {}
