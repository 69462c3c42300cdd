package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"
)

const (
	// openPages is how many pages are open, and pageTime for how long they are looked at.
	openPages = 50
	pageTime  = time.Minute
	// mostPages is how many milliseconds of CPU they may cost the server in a second.
	mostPages = 20
)

// pageQuestions is what an open page asks, and how often: store.js of internal/ui. What judges has the parameter seen.
var pageQuestions = []struct {
	path   string
	every  time.Duration
	judges bool
}{
	{"/fairlead/connections", 10 * time.Second, false}, {"/fairlead/balancers", 15 * time.Second, false},
	{"/fairlead/status?services=false", 17 * time.Second, true}, {"/fairlead/certificates", 17 * time.Second, false},
	{"/fairlead/services", time.Minute, true},
}

// pageSizes are the numbers of Services beside which pages are open.
var pageSizes = []int{100, 1000}

// runPages measures what open pages cost the server.
func (b *bench) runPages(ctx context.Context) (figures []figure, err error) {
	for _, n := range pageSizes {
		got, err := b.pagesAt(ctx, planeSize{services: b.few(n, 60), endpoints: b.few(5, 2), limit: b.limit()})
		if err != nil {
			return figures, fmt.Errorf("at %d Services: %w", n, err)
		}
		figures = append(figures, got...)
	}
	return figures, nil
}

func (b *bench) pagesAt(ctx context.Context, size planeSize) (figures []figure, err error) {
	lasts := pageTime
	if b.small {
		lasts = 2 * time.Second
	}
	err = b.inWorld(ctx, size, func(w *world) (err error) {
		if err := w.settle(time.Minute); err != nil {
			return err
		}
		idle, err := w.costs(ctx, lasts)
		if err != nil {
			return err
		}
		pages, end := context.WithCancel(ctx)
		var open errgroup.Group
		var asked atomic.Int64
		defer func() {
			end()
			err = errors.Join(err, open.Wait())
		}()
		for range b.few(openPages, 3) {
			open.Go(func() error { return w.page(pages, &asked) })
		}
		select {
		case <-time.After(lasts): // all have their lists, and each question was asked
		case <-ctx.Done():
			return ctx.Err()
		}
		before := asked.Load()
		busy, err := w.costs(ctx, lasts)
		n := asked.Load() - before
		b.say("%d questions were answered in %s", n, lasts)
		if n == 0 && !b.small {
			err = errors.Join(err, errors.New("no question was answered"))
		}
		figures = []figure{unpaired(fmt.Sprintf("CPU of the server in a second for %d pages at %s", b.few(openPages, 3), size), milliseconds,
			max(0, busy-idle), expectation{below: mostPages})}
		return err
	})
	return figures, err
}

// costs returns the milliseconds of CPU that the server takes in each second of a time.
func (w *world) costs(ctx context.Context, lasts time.Duration) (float64, error) {
	before, err := w.cpu()
	if err != nil {
		return 0, err
	}
	begin := time.Now()
	select {
	case <-time.After(lasts):
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	after, err := w.cpu()
	return milliseconds.in(after-before) / time.Since(begin).Seconds(), err
}

// page is an open page until ctx ends: its watches, and its questions, which begin at a random moment.
func (w *world) page(ctx context.Context, asked *atomic.Int64) error {
	client, err := rest.HTTPClientFor(rest.CopyConfig(w.config))
	if err != nil {
		return err
	}
	client.Timeout = 0 // of watches
	defer client.CloseIdleConnections()
	var seen atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	for _, kind := range []string{"/api/v1/services", "/apis/discovery.k8s.io/v1/endpointslices", "/api/v1/nodes"} {
		g.Go(func() error { return w.follows(ctx, client, kind, &seen) })
	}
	for _, q := range pageQuestions {
		g.Go(func() error {
			wait := time.Duration(rand.Int64N(int64(q.every)))
			for {
				select {
				case <-time.After(wait):
				case <-ctx.Done():
					return nil
				}
				target := q.path
				if q.judges {
					target += map[bool]string{true: "&", false: "?"}[strings.Contains(target, "?")] + "seen=" + strconv.FormatInt(seen.Load(), 10)
				}
				answer, err := w.get(ctx, client, target)
				if err != nil {
					return ended(ctx, err)
				}
				if _, err := io.Copy(io.Discard, answer); err != nil {
					return ended(ctx, err)
				}
				_ = answer.Close()
				asked.Add(1)
				wait = q.every
			}
		})
	}
	return g.Wait()
}

// ended is err, nil if ctx has ended.
func ended(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// get asks the API server. One that is busy with this user's questions is asked again, as the page does.
func (w *world) get(ctx context.Context, client *http.Client, target string) (io.ReadCloser, error) {
	for {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, w.config.Host+target, nil)
		if err != nil {
			return nil, err
		}
		answer, err := client.Do(r)
		if err != nil {
			return nil, err
		}
		switch answer.StatusCode {
		case http.StatusOK:
			return answer.Body, nil
		case http.StatusTooManyRequests:
			_ = answer.Body.Close()
			select {
			case <-time.After(500*time.Millisecond + time.Duration(rand.Int64N(int64(time.Second)))):
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		default:
			text, _ := io.ReadAll(io.LimitReader(answer.Body, 1000))
			_ = answer.Body.Close()
			return nil, fmt.Errorf("%s: %s: %s", target, answer.Status, text)
		}
	}
}

// versioned is what a page has to see of an object, and of a list.
type versioned struct {
	Metadata struct{ ResourceVersion string }
}

// follows lists and watches a kind, and keeps the newest version of an object in seen.
func (w *world) follows(ctx context.Context, client *http.Client, kind string, seen *atomic.Int64) error {
	saw := func(o versioned) {
		version, _ := strconv.ParseInt(o.Metadata.ResourceVersion, 10, 64)
		for {
			has := seen.Load()
			if version <= has || seen.CompareAndSwap(has, version) {
				return
			}
		}
	}
	body, err := w.get(ctx, client, kind)
	if err != nil {
		return ended(ctx, err)
	}
	var list struct {
		versioned
		Items []versioned
	}
	err = json.NewDecoder(body).Decode(&list)
	_ = body.Close()
	if err != nil {
		return ended(ctx, err)
	}
	for _, o := range list.Items {
		saw(o)
	}
	query := url.Values{"watch": {"1"}, "allowWatchBookmarks": {"true"}, "resourceVersion": {list.Metadata.ResourceVersion}}
	if body, err = w.get(ctx, client, kind+"?"+query.Encode()); err != nil {
		return ended(ctx, err)
	}
	defer body.Close()
	lines := bufio.NewScanner(body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var event struct {
			Type   string
			Object versioned
		}
		if err := json.Unmarshal(lines.Bytes(), &event); err != nil {
			return ended(ctx, err)
		}
		if event.Type != "BOOKMARK" {
			saw(event.Object)
		}
	}
	return ended(ctx, errors.Join(errors.New(kind+": the watch ended"), lines.Err()))
}
