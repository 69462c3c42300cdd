package kubeproxy

import (
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/http/pprof"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	"k8s.io/apiserver/pkg/server/flagz"
	"k8s.io/apiserver/pkg/server/statusz"
	"k8s.io/apiserver/pkg/util/compatibility"
	cliflag "k8s.io/component-base/cli/flag"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/kubeproxyconfig"
)

// component is the name on /flagz and /statusz.
const component = "fairlead-proxy"

// pages are paths with their handlers.
type pages map[string]http.Handler

// Handle adds a page.
func (p pages) Handle(path string, h http.Handler) { p[path] = h }

// Pages returns kube-proxy's pages for finding faults, beside /metrics: /configz, /flagz and /statusz, and
// with --profiling /debug/pprof and /debug/flags/v. mode is the mode that the proxy has chosen.
func (k *Flags) Pages(g *base.Global, mode string) (map[string]http.Handler, error) {
	cfg, err := k.Effective(mode)
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(map[string]any{kubeproxyconfig.Group: cfg})
	if err != nil {
		return nil, err
	}
	p := pages{}
	p["/configz"] = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		_, _ = w.Write(text)
	})
	if k.profiling {
		for path, h := range map[string]http.HandlerFunc{
			"/debug/pprof/": pprof.Index, "/debug/pprof/cmdline": pprof.Cmdline, "/debug/pprof/profile": pprof.Profile,
			"/debug/pprof/symbol": pprof.Symbol, "/debug/pprof/trace": pprof.Trace,
		} {
			p[path] = h
		}
		p["/debug/flags/v"] = verbosity(g)
	}
	flagz.Install(p, component, flagz.NamedFlagSetsReader{
		FlagSets: cliflag.NamedFlagSets{FlagSets: map[string]*pflag.FlagSet{"generic": k.flags}},
	})
	listed := append(slices.Collect(maps.Keys(p)), "/explain", "/healthz", "/history", "/metrics", "/proxyMode", "/services", "/status",
		statusz.DefaultStatuszPath)
	slices.Sort(listed)
	statusz.Install(p, component, statusz.NewRegistry(compatibility.DefaultBuildEffectiveVersion(), statusz.WithListedPaths(listed)))
	return p, nil
}

// verbosity sets the level of the log, as a verbosity of kube-proxy.
func verbosity(g *base.Global) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPut {
			w.Header().Set("Allow", http.MethodPut)
			http.Error(w, "PUT a verbosity", http.StatusMethodNotAllowed)
			return
		}
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 16))
		n, perr := strconv.ParseUint(strings.TrimSpace(string(body)), 10, 31)
		if err != nil || perr != nil {
			http.Error(w, "want a number of 0 or more", http.StatusBadRequest)
			return
		}
		if err := g.SetLevel(levelOf(int32(n))); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		_, _ = io.WriteString(w, "the level of the log is "+levelOf(int32(n))+"\n")
	}
}
