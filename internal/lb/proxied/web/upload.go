package web

import (
	"errors"
	"io"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/http1"
	"github.com/fairlead/fairlead/internal/lb/proxied/panics"
)

// upload is the body of a request on its way while the answer is awaited.
type upload struct {
	pump
	exchange *exchange
	done     chan struct{}
	err      error // once done is closed
}

func (u *upload) touch() { u.exchange.touch() }

// waited decides whether to go on waiting for the client.
func (u *upload) waited() error {
	if u.exchange.silentFor() >= u.exchange.limit()+u.exchange.grace() {
		return errLeft
	}
	return nil
}

// beginUpload starts to send the body of the request while the answer is awaited.
func (x *exchange) beginUpload(b pod) {
	if u, is := b.(*upstream); is {
		u.allowSilence(x.limit())
	}
	up := &upload{exchange: x, done: make(chan struct{})}
	x.upload = up
	x.page.keep()
	up.pump = pump{to: b, from: x.client.source(), trailers: x.req.Announced || x.second, timeout: x.limit(), bytes: &x.received, of: up}
	up.most, up.request = x.most, x
	up.copied, up.kept = x.copied, x.again.keep()
	up.err = panics.Err // if there is one
	x.engine.host.Run(func() {
		defer close(up.done)
		defer x.engine.host.Panics().Recover(x.config.Service, closer(b.abort))
		up.err = up.run(pollInterval)
		switch {
		case up.err == nil:
			up.copied.send()
		case errors.Is(up.err, http1.ErrMalformed):
			x.conn.malformed.Store(true)
			b.abort()
		case errors.Is(up.err, errBody):
			x.bodyLong.Store(true)
			b.abort()
		case !errors.Is(up.err, errSink): // the Pod may have answered before it has closed
			b.abort()
		}
	})
}

// closer is an io.Closer of a function.
type closer func()

// Close calls it.
func (f closer) Close() error { f(); return nil }

var _ io.Closer = closer(nil)

// endUpload waits until the body of the request is sent, or gives it up if it has not been read yet. It reports
// whether something of it is left.
func (x *exchange) endUpload(b pod) bool {
	up := x.upload
	if up == nil {
		return false
	}
	select {
	case <-up.done:
	default:
		if !up.ended.Load() {
			up.abandon(b)
		}
		<-up.done
	}
	return up.err != nil
}

// abandon ends an upload of which not all was read.
func (u *upload) abandon(to pod) {
	u.abandoned.Store(true)
	to.abort()
	again := time.NewTicker(abandonInterval) // the pump may have been about to set its own deadline
	defer again.Stop()
	for {
		u.from.wake()
		select {
		case <-u.done:
			return
		case <-again.C:
		}
	}
}

// abandonInterval is how often an upload that is abandoned is woken until it has ended.
const abandonInterval = 10 * time.Millisecond
