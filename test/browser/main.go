// Command browser drives Debian's Chromium for tests. It reads requests from standard input, one JSON object a line, and answers
// each with one line; at the end of the input it ends the browser. A browser of a test reaches only the network namespace that the
// program was started in.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/heapprofiler"
	cdplog "github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

// The size of the window, in pixels.
const width, height = 1400, 900

// keys are the names of keys without a character.
var keys = map[string]string{"Tab": kb.Tab, "Enter": kb.Enter, "Escape": kb.Escape, "ArrowDown": kb.ArrowDown, "ArrowUp": kb.ArrowUp}

// timeout bounds one request.
const timeout = 2 * time.Minute

// request is one thing to do, by the field that is set.
type request struct {
	// Open is a URL to load.
	Open string `json:"open,omitempty"`
	// Wait is a JavaScript expression to wait for until it is true; Eval is one whose value is the answer.
	Wait string `json:"wait,omitempty"`
	Eval string `json:"eval,omitempty"`
	// Into is a selector of a field that gets Text, as typed by a user; Click one to click at; Key a key to press: Tab, Enter, Escape,
	// ArrowDown or ArrowUp, or text to type where the focus is.
	Into  string `json:"into,omitempty"`
	Text  string `json:"text,omitempty"`
	Click string `json:"click,omitempty"`
	Key   string `json:"key,omitempty"`
	// Theme is light or dark, with reduced motion; Motion is reduce or no-preference, with the theme of the system.
	Theme  string `json:"theme,omitempty"`
	Motion string `json:"motion,omitempty"`
	// Zoom is a factor, 1 for the whole window: the page then has so many times fewer pixels of CSS in each direction.
	Zoom string `json:"zoom,omitempty"`
	// Picture is a file to write the page to, as PNG.
	Picture string `json:"picture,omitempty"`
	// Script is a file with JavaScript to run in the page.
	Script string `json:"script,omitempty"`
	// Heap asks for the bytes that JavaScript uses after its garbage was collected.
	Heap bool `json:"heap,omitempty"`
	// Seen asks what happened since the start.
	Seen bool `json:"seen,omitempty"`
}

type answer struct {
	Value json.RawMessage `json:"value,omitempty"`
	Error string          `json:"error,omitempty"`
}

// seen is what happened in the browser.
type seen struct {
	mu sync.Mutex
	// Hosts are the hosts that requests went to, Errors the errors and the refused content of the console.
	Hosts  []string `json:"hosts"`
	Errors []string `json:"errors"`
	// Bytes are the bytes received of files, by path below /ui.
	Bytes map[string]int64 `json:"bytes"`

	paths map[network.RequestID]string
}

func (s *seen) note(event any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch e := event.(type) {
	case *network.EventRequestWillBeSent:
		u, err := url.Parse(e.Request.URL)
		if err != nil || !slices.Contains([]string{"http", "https", "ws", "wss"}, u.Scheme) {
			return
		}
		if !slices.Contains(s.Hosts, u.Host) {
			s.Hosts = append(s.Hosts, u.Host)
		}
		s.paths[e.RequestID] = u.Path
	case *network.EventLoadingFinished:
		if p := s.paths[e.RequestID]; strings.HasPrefix(p, "/ui") {
			s.Bytes[p] = int64(e.EncodedDataLength)
		}
	case *runtime.EventExceptionThrown:
		text := e.ExceptionDetails.Text
		if x := e.ExceptionDetails.Exception; x != nil {
			text += " " + x.Description
		}
		s.Errors = append(s.Errors, text)
	case *runtime.EventConsoleAPICalled:
		if e.Type == runtime.ConsoleAPICalledTypeError || e.Type == runtime.ConsoleAPICalledTypeWarning {
			var words []string
			for _, a := range e.Args {
				words = append(words, string(a.Value)+a.Description)
			}
			s.Errors = append(s.Errors, "console: "+strings.Join(words, " "))
		}
	case *cdplog.EventEntryAdded:
		// Of source network are answers with an error, which a page may expect.
		failed := e.Entry.Level == cdplog.EntryLevelError && e.Entry.Source != cdplog.EntrySourceNetwork
		if failed || e.Entry.Source == cdplog.EntrySourceSecurity {
			s.Errors = append(s.Errors, fmt.Sprintf("%s: %s %s", e.Entry.Source, e.Entry.Text, e.Entry.URL))
		}
	}
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "browser:", err)
		os.Exit(1)
	}
}

func run() error {
	dir, err := os.MkdirTemp("", "browser-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	options := append(slices.Clone(chromedp.DefaultExecAllocatorOptions[:]),
		chromedp.ExecPath("/usr/bin/chromium"), chromedp.NoSandbox, chromedp.DisableGPU, chromedp.NoFirstRun, chromedp.UserDataDir(dir),
		chromedp.Flag("disable-background-networking", true), chromedp.Flag("disable-component-update", true),
		chromedp.Flag("disable-dev-shm-usage", true), chromedp.Flag("ignore-certificate-errors", true),
		chromedp.WindowSize(width, height), chromedp.CombinedOutput(os.Stderr),
		chromedp.Env("HOME="+dir, "XDG_CONFIG_HOME="+dir, "XDG_CACHE_HOME="+dir))
	ctx, cancel := chromedp.NewExecAllocator(context.Background(), options...)
	defer cancel()
	ctx, cancel = chromedp.NewContext(ctx)
	defer cancel()
	s := &seen{Hosts: []string{}, Errors: []string{}, Bytes: map[string]int64{}, paths: map[network.RequestID]string{}}
	if err := chromedp.Listen(ctx, s.note); err != nil {
		return fmt.Errorf("cannot start /usr/bin/chromium ('make setup' installs it): %w", err)
	}
	if _, err := chromedp.Call(ctx, network.Enable, network.EnableParams{}); err != nil {
		return err
	}
	if _, err := chromedp.Call(ctx, cdplog.Enable, cdp.Empty{}); err != nil {
		return err
	}
	in, out := bufio.NewReader(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return nil // the end of the input
		}
		var r request
		if err := json.Unmarshal(line, &r); err != nil {
			return err
		}
		value, err := s.do(ctx, &r)
		a := answer{Value: value}
		if err != nil {
			a.Error = err.Error()
		}
		if err := out.Encode(a); err != nil {
			return err
		}
	}
}

func (s *seen) do(ctx context.Context, r *request) (json.RawMessage, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	switch {
	case r.Open != "":
		return nil, chromedp.Do(ctx, chromedp.Navigate(r.Open))
	case r.Wait != "":
		return nil, s.wait(ctx, r.Wait)
	case r.Eval != "":
		return s.eval(ctx, r.Eval)
	case r.Script != "":
		text, err := os.ReadFile(r.Script)
		if err != nil {
			return nil, err
		}
		return s.eval(ctx, string(text)+"\n;0")
	case r.Into != "":
		return nil, s.replace(ctx, r.Into, r.Text)
	case r.Click != "":
		return nil, chromedp.Do(ctx, chromedp.Click(chromedp.CSS(r.Click)))
	case r.Key != "":
		key, named := keys[r.Key]
		if !named {
			key = r.Key
		}
		return nil, chromedp.Do(ctx, chromedp.KeyEvent(key))
	case r.Motion != "":
		_, err := chromedp.Call(ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{
			{Name: "prefers-reduced-motion", Value: r.Motion},
		}})
		return nil, err
	case r.Zoom != "":
		factor, err := strconv.ParseFloat(r.Zoom, 64)
		if err != nil {
			return nil, err
		}
		_, err = chromedp.Call(ctx, emulation.SetDeviceMetricsOverride, emulation.SetDeviceMetricsOverrideParams{
			Width: int64(width / factor), Height: int64(height / factor), DeviceScaleFactor: factor})
		return nil, err
	case r.Theme != "":
		_, err := chromedp.Call(ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{
			{Name: "prefers-color-scheme", Value: r.Theme}, {Name: "prefers-reduced-motion", Value: "reduce"},
		}})
		return nil, err
	case r.Picture != "":
		png, err := chromedp.Run(ctx, chromedp.CaptureScreenshot())
		if err != nil {
			return nil, err
		}
		return nil, os.WriteFile(r.Picture, png, 0o644)
	case r.Heap:
		if _, err := chromedp.Call(ctx, heapprofiler.CollectGarbage, cdp.Empty{}); err != nil {
			return nil, err
		}
		used, err := chromedp.Call(ctx, runtime.GetHeapUsage, cdp.Empty{})
		if err != nil {
			return nil, err
		}
		return json.Marshal(int64(used.UsedSize))
	case r.Seen:
		s.mu.Lock()
		defer s.mu.Unlock()
		return json.Marshal(s)
	}
	return nil, fmt.Errorf("an empty request")
}

// wait asks until an expression is true. chromedp.Poll compiles a function in the page, which a strict policy refuses.
func (s *seen) wait(ctx context.Context, expression string) error {
	for {
		value, err := s.eval(ctx, "!!("+expression+")")
		if err != nil || string(value) == "true" {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("not true within %s: %s", timeout, expression)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// replace types text in place of what a field has.
func (s *seen) replace(ctx context.Context, field, text string) error {
	name, err := json.Marshal(field)
	if err != nil {
		return err
	}
	if err := s.wait(ctx, fmt.Sprintf("document.querySelector(%s)", name)); err != nil {
		return err
	}
	if _, err := s.eval(ctx, fmt.Sprintf("{ const f = document.querySelector(%s); f.focus(); f.select(); }", name)); err != nil {
		return err
	}
	return chromedp.Do(ctx, chromedp.KeyEvent(text))
}

// eval returns the value of an expression, or of its promise.
func (s *seen) eval(ctx context.Context, expression string) (json.RawMessage, error) {
	value, err := chromedp.Run(ctx, chromedp.Evaluate[any](expression, chromedp.EvalAwaitPromise))
	if err != nil {
		return nil, err
	}
	return json.Marshal(value)
}
