package lifecycle

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// OptionalHTTP serves h on one address, and retries while the address cannot be
// listened on: what it serves is not worth a node's end.
func OptionalHTTP(log *slog.Logger, name, addr string, h http.Handler) Component {
	c := HTTP(name, addr, h)
	serve := c.Run
	c.Run = func(ctx context.Context) error {
		for failed := false; ; failed = true {
			err := serve(ctx)
			if ctx.Err() != nil {
				return nil
			}
			if !failed {
				log.Warn("cannot serve "+name+"; retrying", "address", addr, "err", err, "in", httpRetry)
			}
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(httpRetry):
			}
		}
	}
	return c
}

// httpRetry is the time between attempts to listen.
const httpRetry = time.Second

// HTTP serves h on one address.
func HTTP(name, addr string, h http.Handler) Component {
	return Component{Name: name, Run: func(ctx context.Context) error {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			return err
		}
		server := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second}
		stop := context.AfterFunc(ctx, func() { server.Close() })
		defer stop()
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	}}
}
