// Package uicmd has 'fairlead ui', which opens the page of a cluster.
package uicmd

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"html"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/ui"
)

// Bounds of requests and of the end.
const (
	lookTimeout   = 10 * time.Second
	headerTimeout = 10 * time.Second
	endTimeout    = 2 * time.Second
)

type uiFlags struct {
	base.ClientFlags
	loopback  bool
	port      uint16
	noBrowser bool
}

// NewUI returns 'fairlead ui'.
func NewUI(g *base.Global) *cobra.Command {
	var f uiFlags
	cmd := &cobra.Command{
		Use:   "ui",
		Short: "Open the page of the cluster in a browser",
		Long: `Open the page of the cluster, which shows what answers, what is wrong and why, and what
changed. A server of fairlead serves it at https://SERVER/ui: this command prints the URL, and
starts the browser if there is one. Log in there with a bearer token, or with a client
certificate that the browser has; the page shows what the rights of that user allow.

With --loopback, and for any other Kubernetes API, this command serves the page itself, on
loopback and until it is stopped, with the rights of the kubeconfig. The link that it prints
has a key: who has the link, has these rights to read. A user who may not read the Services
of all namespaces sees the namespace of the kubeconfig.`,
		Example: `  fairlead ui
  fairlead ui --loopback
  fairlead ui --loopback --namespace shop
  fairlead ui --kubeconfig ~/.kube/config --port 8001 --no-browser`,
		Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, namespace, err := f.Load()
			if err != nil {
				return err
			}
			if !f.loopback {
				at, err := served(cmd.Context(), cfg)
				if err != nil {
					return err
				}
				if at != "" {
					at += fragment("namespace", f.Namespace)
					fmt.Fprintf(g.Out, "%s\nlog in with a bearer token ('kubectl create token NAME'), or use 'fairlead ui --loopback'\n", at)
					return f.open(at)
				}
			}
			if f.Namespace == "" && readsAll(cmd.Context(), cfg) {
				namespace = ""
			}
			return f.serve(cmd.Context(), g, cfg, namespace)
		},
	}
	f.Add(cmd)
	cmd.Flags().StringVarP(&f.Namespace, "namespace", "n", "",
		"show only this namespace (default: all, or the kubeconfig's if the user may not read all)")
	cmd.Flags().BoolVar(&f.loopback, "loopback", false,
		"serve the page on loopback with the rights of the kubeconfig, also for a server of fairlead")
	cmd.Flags().Uint16Var(&f.port, "port", 0, "port on loopback (default: a free one)")
	cmd.Flags().BoolVar(&f.noBrowser, "no-browser", false, "do not start a browser")
	return cmd
}

// fragment returns the part of a URL that no server sees, with the values that are not empty.
func fragment(pairs ...string) string {
	values := url.Values{}
	for i := 0; i < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			values.Set(pairs[i], pairs[i+1])
		}
	}
	if len(values) == 0 {
		return ""
	}
	return "#" + values.Encode()
}

// readsAll reports whether the user may read the Services of all namespaces; also true if the API does not tell: the page then does.
func readsAll(ctx context.Context, cfg *rest.Config) bool {
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	_, err = client.CoreV1().Services("").List(ctx, metav1.ListOptions{Limit: 1})
	return !apierrors.IsForbidden(err)
}

// served returns the URL at which the API server itself serves the page, "" if it does not.
func served(ctx context.Context, cfg *rest.Config) (string, error) {
	target, _, err := rest.DefaultServerUrlFor(cfg)
	if err != nil {
		return "", err
	}
	client, err := rest.HTTPClientFor(rest.AnonymousClientConfig(cfg)) // the files are for everyone
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	at := target.JoinPath(ui.Path).String()
	r, err := http.NewRequestWithContext(ctx, http.MethodHead, at+"/app.js", nil)
	if err != nil {
		return "", err
	}
	answer, err := client.Do(r)
	if err != nil {
		return "", fmt.Errorf("the API server does not answer: %s%s", base.OneLine(err), base.Remedy(err))
	}
	_ = answer.Body.Close() // HEAD has no body
	if answer.StatusCode != http.StatusOK || !strings.HasPrefix(answer.Header.Get("Content-Type"), "text/javascript") {
		return "", nil
	}
	return at, nil
}

// serve serves the page on loopback until ctx ends, of a namespace or if that is empty of all.
func (f *uiFlags) serve(ctx context.Context, g *base.Global, cfg *rest.Config, namespace string) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(f.port))))
	if err != nil {
		return fmt.Errorf("cannot serve the page: %w", err)
	}
	defer listener.Close()
	_, port, _ := net.SplitHostPort(listener.Addr().String()) // the listener's own text
	secret := rand.Text()
	handler, err := ui.Local(cfg, []string{"127.0.0.1:" + port, "localhost:" + port}, secret)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: headerTimeout, BaseContext: func(net.Listener) context.Context { return ctx }}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	link := "http://127.0.0.1:" + port + ui.Path + "/" + fragment("key", secret, "namespace", namespace)
	fmt.Fprintf(g.Out, "%s\nthis link has the rights of the kubeconfig; stop with Ctrl-C\n", link)
	remove, err := f.openSecretly(link)
	defer remove()
	if err != nil {
		fmt.Fprintln(g.Err, "cannot start a browser:", base.OneLine(err))
	}
	select {
	case err = <-failed:
		return err
	case <-ctx.Done():
	}
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	if server.Shutdown(end) != nil { // a watch goes on
		_ = server.Close()
	}
	if err := <-failed; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// openSecretly opens a link that other users of the machine must not see: the list of processes shows only the name of a file that
// they cannot read. The function that it returns removes the file.
func (f *uiFlags) openSecretly(link string) (remove func(), err error) {
	remove = func() {}
	if f.noBrowser || len(browser()) == 0 {
		return remove, nil
	}
	dir, err := os.MkdirTemp("", "fairlead-ui-")
	if err != nil {
		return remove, err
	}
	remove = func() { _ = os.RemoveAll(dir) }
	file := filepath.Join(dir, "open.html")
	text := `<!doctype html><meta charset="utf-8"><title>fairlead</title>` +
		`<meta http-equiv="refresh" content="0; url=` + html.EscapeString(link) + `">`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return remove, err
	}
	return remove, f.open("file://" + file)
}

// open starts the browser, which outlives this command.
func (f *uiFlags) open(link string) error {
	program := browser()
	if f.noBrowser || len(program) == 0 {
		return nil
	}
	cmd := exec.Command(program[0], append(program[1:], link)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C ends this command, not the browser
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("cannot start the browser %s: %w; --no-browser only prints the URL", program[0], err)
	}
	return cmd.Process.Release()
}

// browser is the program that opens a URL, with its arguments; none on a machine without a display.
func browser() []string {
	if words := strings.Fields(os.Getenv("BROWSER")); len(words) > 0 {
		return words
	}
	name := "xdg-open"
	switch {
	case runtime.GOOS == "darwin":
		name = "open"
	case os.Getenv("DISPLAY") == "" && os.Getenv("WAYLAND_DISPLAY") == "":
		return nil
	}
	if path, err := exec.LookPath(name); err == nil {
		return []string{path}
	}
	return nil
}
