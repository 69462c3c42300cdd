package web

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/internal/gateway/policy"
	"github.com/fairlead/fairlead/internal/lb/proxied"
	"github.com/fairlead/fairlead/internal/lb/proxied/compress"
	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/pods"
	"github.com/fairlead/fairlead/internal/lb/proxied/stream"
	"github.com/fairlead/fairlead/internal/trace/request"
)

// Why a request fails.
var (
	// errStale means that a kept connection had been closed by the Pod: it has answered nothing.
	errStale  = errors.New("the endpoint has closed a kept connection")
	errResend = errors.New("the endpoint has not looked at the request")
	errSilent = errors.New("the endpoint is silent")
	errLeft   = errors.New("the client has left")
	errAnswer = errors.New("not an answer of HTTP")
)

// carry has the request answered, as the listener's configuration routes it. It reports false if no answer is whole: then
// the client's end must be cut off.
func (x *exchange) carry() bool {
	x.websocket = strings.EqualFold(string(x.req.Upgrade), "websocket")
	if !x.isHead && x.req.Minor > 0 {
		x.accepts = compress.Accepted(x.req.Fields)
	}
	x.trace = x.config.Trace(x.req)
	if !x.config.AllowsRequest(x.conn.client.Addr()) {
		x.trace.Decided("the client sends more requests than the annotation fairlead.dev/lb-client-requests allows")
		x.reply(proxied.RetryLater(http.StatusTooManyRequests))
		return true
	}
	route := x.config.Route(x.req, x.conn.origin())
	route.Tell(x.trace)
	if x.refusal, x.counts = route.Refusal, route.Count; route.Reply != nil {
		x.reply(route.Reply)
		return true
	}
	if route.Done != nil {
		defer route.Done()
	}
	x.most = int64(x.config.Spec.Clients.Body) << 10
	if route.Body > 0 && (x.most == 0 || route.Body < x.most) {
		x.most = route.Body
	}
	if tooLong(x, x.req.Length) {
		x.trace.Decided(errBody.Error())
		x.reply(&proxied.Reply{Status: http.StatusRequestEntityTooLarge})
		return true
	}
	x.to, x.edit, x.held, x.question, x.deadline = route.To, route.Edit, route.Session, route.Ask, route.Deadline
	x.forPage = route.Spare
	if x.codings = x.config.Spec.Compress; route.Compress != nil {
		x.codings = route.Compress
	}
	marks := marksOf(x)
	x.id = marks.Request(x.req, &x.conn.tls)
	if route.Ask != nil {
		defer ungather(x, x.client)
		if passes, whole := authorize(x, route.Ask, route.Asked); !passes {
			return whole
		}
	}
	if x.to.Sticky.Cookies() {
		x.cookies = http1.ValuesOf(x.req.Fields, http1.Cookie)
	}
	if len(route.Mirrors) > 0 {
		x.copied = copyOf(x, route.Mirrors)
		defer x.copied.end()
	}
	if route.Retry != nil {
		x.again = newRetrying(x, route.Retry)
		defer x.again.end()
	}
	if route.Pages != nil {
		x.page = &paged{x: x, pages: route.Pages, at: route.Paged}
		defer x.page.end()
	}
	err := x.try()
	x.leave()
	stream.PutBuffer(x.body)
	x.body = nil
	if replaced, whole := x.page.replace(err); replaced {
		return whole
	}
	return err == nil || x.failed(err)
}

// try has a Pod answer, and another one while no byte of the request was sent.
func (x *exchange) try() (err error) {
	whole := x.prepare()
	if tooLong(x, int64(len(whole))) { // there was no Content-Length
		return errBody
	}
	if x.client.source().done() {
		x.copied.add(whole)
		x.copied.send()
	}
	x.search = reaching{x: x, t: transportOf(x.to)}
	r := &x.search
	simple := x.client.source().done() && len(whole) == 0 && x.req.Idempotent() && !x.again.never()
	err = r.deliver(whole, simple)
	for repeats(x, err) {
		if err := x.again.wait(); err != nil {
			return err
		}
		whole = x.again.rewind(whole)
		*r = reaching{x: x, t: r.t, again: true, before: r.before}
		if x.member != nil {
			r.tried = append(r.space[:0], x.member)
		}
		x.leave()
		err = r.deliver(whole, simple)
	}
	return err
}

// deliver has a Pod answer, and another one while no byte of the request was sent. simple reports whether it may be sent again.
func (r *reaching) deliver(whole []byte, simple bool) (err error) {
	x := r.x
	r.tried = append(r.space[:0], r.tried...)
	defer r.end()
	for {
		b, m, err := r.reach()
		if err != nil {
			return err
		}
		if r.before = m; !x.use(m) { // it has left just now
			b.release(x, false)
			continue
		}
		err = x.ask(b, m, whole, simple, !slices.Contains(r.redialed, m))
		x.trace.Got(m.Addr(), x.podStatus, err)
		switch {
		case errors.Is(err, errResend):
			r.redial, r.redialed = m, append(r.redialed, m)
		case err == nil || !isUndialed(err) || x.drained.Load():
			return err
		default:
			r.last = err
		}
		x.leave()
	}
}

// maxWhole is how long a body may be that goes out together with its head.
const maxWhole = 8 << 10

// prepare takes the body of the request if it is short and there already, and returns a copy.
func (x *exchange) prepare() []byte {
	if !x.req.Continue && !x.client.source().done() {
		if p, ok := x.client.whole(maxWhole); ok {
			x.body = append(stream.GetBuffer()[:0], p...)
			x.client.takeWhole(len(p))
			x.received.Store(int64(len(p)))
			if x.req.Chunked {
				x.req.Chunked, x.req.Length = false, int64(len(p))
			}
		}
	}
	// While a body is on its way there is no other use of the connection (RFC 9110, section 7.8: the client must send all
	// of it before the other protocol).
	x.websocket = x.websocket && x.client.source().done()
	return x.body
}

// ask sends the request to a member and passes its answer on. simple: it may be sent again; again: to this Pod, for errResend.
func (x *exchange) ask(b pod, m *pods.Member, whole []byte, simple, again bool) error {
	x.attach(b)
	x.podStatus, x.answered = 0, time.Time{}
	err := x.converse(b, m, whole)
	x.attach(nil)
	unseen := b.unseen(err)
	b.release(x, (err == nil || errors.Is(err, errRepeat) || errors.Is(err, errReplaced)) && x.reusable && !x.drained.Load())
	if simple && !x.answering && errors.Is(err, syscall.ETIMEDOUT) && !x.drained.Load() { // its node is dark
		x.to.Pool.Failed(m, err)
		return &dialError{err}
	}
	if again && !x.drained.Load() && (errors.Is(err, errStale) && simple || unseen && x.upload == nil) {
		return errResend
	}
	judge(x, m, err)
	return err
}

// judge notes how a Pod has answered, unless that says nothing about it: the client has left, or has not sent the whole body, or
// the Pod's turn was over.
func judge(x *exchange, m *pods.Member, err error) {
	if x.podStatus != 0 {
		if after := x.answered.Sub(x.asked); x.forPage {
			x.to.Pool.AnsweredPage(m, x.podStatus, after)
		} else {
			x.to.Pool.Answered(m, x.podStatus, nil, after)
		}
		return
	}
	if err == nil || x.drained.Load() || errors.Is(err, errLeft) || x.conn.malformed.Load() || policy.Over(x.deadline) {
		return
	}
	if up := x.upload; up != nil && up.err != nil && !errors.Is(up.err, errSink) { // it has ended: see endUpload
		return
	}
	x.to.Pool.Answered(m, 0, err, 0)
}

// converse sends the request and passes the answer on.
func (x *exchange) converse(b pod, m *pods.Member, whole []byte) (err error) {
	if x.drained.Load() {
		return pods.ErrNone
	}
	defer func() {
		if x.endUpload(b) {
			x.unread, x.reusable = true, false
		}
	}()
	done := x.client.source().done()
	b.head(x, whole, done)
	waits := x.req.Continue && !done
	if done || waits {
		if err := b.flush(); err != nil && b.stale() {
			return fmt.Errorf("%w: %w", errStale, err)
		} // otherwise it may still have answered
	} else {
		x.beginUpload(b)
	}
	waits, err = x.awaitAnswer(b, waits)
	if err != nil {
		return err
	}
	x.answered, x.podStatus = time.Now(), x.res.Status
	if x.key != "" && x.res.Status/100 == 2 { // to the client that would be consent
		return fmt.Errorf("%w: it does not change the protocol", errAnswer)
	}
	if x.res.Status == http.StatusSwitchingProtocols {
		return x.switchProtocols(b)
	}
	if x.again.takes(x.res.Status) {
		skip(x, b, waits)
		return errRepeat
	}
	if x.page.takes(&x.res) {
		skip(x, b, waits)
		return errReplaced
	}
	return x.answer(b, m, waits)
}

// awaitAnswer reads the head of the answer, and passes interim ones on. While waits, the body of the request is sent
// when the Pod asks for it, or does not answer in time; it returns whether it still waits.
func (x *exchange) awaitAnswer(b pod, waits bool) (bool, error) {
	first := true
	for interim := 0; ; {
		if err := x.readAnswer(b, first, waits); err != nil {
			if !errors.Is(err, errContinue) {
				return waits, err
			}
			waits, x.hasInterim = false, true
			if err := x.client.proceed(); err != nil {
				return false, err
			}
			x.beginUpload(b)
			continue
		}
		first = false
		if x.res.Status >= 200 || x.res.Status == http.StatusSwitchingProtocols {
			return waits, nil
		}
		if interim++; interim > maxInterim {
			return waits, fmt.Errorf("%w: more than %d interim ones", errAnswer, maxInterim)
		}
		again := x.res.Status == http.StatusContinue && x.hasInterim
		x.hasInterim = x.hasInterim || x.res.Status == http.StatusContinue
		if x.req.Minor == 1 && !again {
			if err := x.client.interim(&x.res); err != nil {
				return waits, err
			}
		}
		if x.res.Status == http.StatusContinue && waits {
			waits = false
			x.beginUpload(b)
		}
	}
}

// maxInterim bounds how many interim answers a request has.
const maxInterim = 32

// errContinue means that a Pod has not asked for the body within pollInterval.
var errContinue = errors.New("the endpoint does not ask for the body")

// readAnswer reads the next head of the answer.
func (x *exchange) readAnswer(b pod, first, waits bool) error {
	x.res.Reset()
	for {
		err := b.answer(&x.res, x.again.within(x.poll()))
		switch {
		case err == nil:
			return nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			if waits {
				return errContinue
			}
			if x.silentFor() >= x.patience() || x.again.late() || policy.Over(x.deadline) {
				return errSilent
			}
			if x.client.left() {
				return errLeft
			}
		case x.second && x.client.left():
			return fmt.Errorf("%w: %w", errLeft, err)
		case first && b.stale() && !x.drained.Load():
			return fmt.Errorf("%w: %w", errStale, err)
		default:
			return fmt.Errorf("%w: %w", errAnswer, err)
		}
	}
}

// waited decides whether to go on waiting for a Pod whose answer has begun.
func (x *exchange) waited() error {
	if x.silentFor() >= x.limit() || policy.Over(x.deadline) {
		return errSilent
	}
	if x.client.left() {
		return errLeft
	}
	return nil
}

// answer passes the answer on. waits reports whether the client still waits to be asked for its body.
func (x *exchange) answer(b pod, m *pods.Member, waits bool) error {
	x.unread = waits || x.page.unread()
	x.reusable = !waits
	if x.edit != nil {
		x.edit(&x.res)
	}
	cookie := keep(x, m)
	body := b.source(x)
	if e := compress.Choose(x.codings, x.accepts, &x.res); e != nil {
		defer e.Release()
		body = &compressed{source: body, to: e}
	}
	x.answering, x.status = true, x.res.Status
	to := x.client.answer(body, cookie)
	x.down = pump{to: to, from: body, trailers: true, timeout: x.limit() + x.grace(), bytes: &x.sent, of: x, until: x.deadline}
	return x.down.run(x.poll())
}

// switchProtocols carries bytes both ways after the Pod's consent.
func (x *exchange) switchProtocols(b pod) error {
	u, is := b.(*upstream)
	if !is || !x.websocket || x.upload != nil || !strings.EqualFold(string(x.res.Upgrade), "websocket") {
		return fmt.Errorf("%w: it changes to a protocol that was not asked for", errAnswer)
	}
	x.answering, x.status = true, http.StatusSwitchingProtocols
	u.allowSilence(x.limit())
	return x.client.tunnel(u)
}

// statusLeft is what the access log has of a request whose client has left before an answer, as nginx has it.
const statusLeft = request.StatusLeft

// tooLong reports whether a body is longer than it may be.
func tooLong(x *exchange, length int64) bool {
	return x.most > 0 && length > x.most
}

// failed answers for a Pod, unless its answer has begun. It reports whether the client has a whole answer.
func (x *exchange) failed(err error) bool {
	log := func(status int) {
		x.engine.host.Log().Debug("a request has failed", "service", x.config.Service, "client", x.conn.client, "status", status, "err", err)
	}
	if x.answering && x.client.begun() {
		log(x.status)
		return false
	}
	status := statusOf(x, err)
	x.status = status
	log(status)
	if errors.Is(err, errLeft) {
		x.status = statusLeft
		return false
	}
	answer := &proxied.Reply{Status: status}
	if policy.Over(x.deadline) {
		answer = proxied.Late()
	}
	x.trace.Decided(err.Error())
	x.reply(answer)
	return true
}

// statusOf is the status of the answer for a Pod after a failure.
func statusOf(x *exchange, err error) int {
	switch {
	case x.conn.malformed.Load():
		return http.StatusBadRequest
	case x.bodyLong.Load(), errors.Is(err, errBody):
		return http.StatusRequestEntityTooLarge
	case errors.Is(err, errSlow):
		return http.StatusRequestTimeout
	case errors.Is(err, pods.ErrNone), x.drained.Load():
		return http.StatusServiceUnavailable
	case errors.Is(err, errSilent), errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, syscall.ETIMEDOUT):
		return http.StatusGatewayTimeout
	}
	return http.StatusBadGateway
}

// reply answers for a Pod.
func (x *exchange) reply(r *proxied.Reply) {
	if x.refusal != nil {
		x.refusal(r)
	}
	x.status = r.Status
	x.client.reply(r)
}
