package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"
)

// requestTimeout bounds one request.
const requestTimeout = 30 * time.Second

// acceptTable asks for what kubectl get prints.
const acceptTable = "application/json;as=Table;v=v1;g=meta.k8s.io"

// Runner sends the requests of cases to one server.
type Runner struct {
	// Other says that the server is not fairlead: what a case explains as a
	// difference is no error then.
	Other bool

	client *http.Client
	base   string
	prefix string
	n      int
	// Requests counts the requests of cases.
	Requests int
}

// NewRunner returns a Runner for the server of config, whose client must be
// allowed everything. The namespaces of the cases begin with prefix.
func NewRunner(config *rest.Config, prefix string) (*Runner, error) {
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, err
	}
	base, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil, err
	}
	return &Runner{client: client, base: strings.TrimSuffix(base.String(), "/"), prefix: prefix}, nil
}

// Run makes the requests of c and returns every difference from the answers
// that c expects, one line each. What the case created is deleted again.
func (r *Runner) Run(ctx context.Context, c Case) (differences []string, err error) {
	run, err := r.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer run.cleanUp(context.WithoutCancel(ctx))
	for i := range c.Steps {
		s := &c.Steps[i]
		got, err := run.do(ctx, s)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", s.Line, err)
		}
		found := run.compare(s, got)
		if r.Other && len(s.Explained) > 0 {
			continue
		}
		for _, d := range found {
			differences = append(differences, fmt.Sprintf("%d: %s %s: %s", s.Line, s.Verb, s.Target, d))
		}
	}
	return differences, nil
}

// begin makes the namespace of the next case.
func (r *Runner) begin(ctx context.Context) (*run, error) {
	r.n++
	ns := fmt.Sprintf("%s-%d", r.prefix, r.n)
	run := &run{Runner: r, vars: map[string]string{"NS": ns}}
	a, err := run.send(ctx, "POST", "/api/v1/namespaces", "application/json",
		[]byte(`{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"`+ns+`"}}`))
	if err != nil {
		return nil, err
	}
	if a.code != http.StatusCreated {
		return nil, fmt.Errorf("cannot create namespace %s: %d %s", ns, a.code, a.body)
	}
	// kube-controller-manager makes this account, without which there are no
	// Pods; it need not run, or may not have come to it yet.
	account := "/api/v1/namespaces/" + ns + "/serviceaccounts"
	if a, err = run.send(ctx, "POST", account, "application/json",
		[]byte(`{"apiVersion":"v1","kind":"ServiceAccount","metadata":{"name":"default"}}`)); err != nil {
		return nil, err
	}
	if a.code != http.StatusCreated && a.code != http.StatusConflict {
		return nil, fmt.Errorf("cannot create the account default in %s: %d %s", ns, a.code, a.body)
	}
	return run, nil
}

// run is the running of one case.
type run struct {
	*Runner
	vars    map[string]string
	created []string
}

// answer is what came back.
type answer struct {
	code     int
	body     []byte
	object   any
	warnings []string
}

func (r *run) do(ctx context.Context, s *Step) (answer, error) {
	r.Requests++
	url, kind, err := resolve(r.expand(s.Target), r.vars["NS"])
	if err != nil {
		return answer{}, err
	}
	body := r.expand(s.Body)
	verb, contentType := s.Verb, "application/json"
	switch verb {
	case "RAW":
		return r.send(ctx, "POST", url, contentType, []byte(strings.TrimSpace(body)))
	case "TABLE":
		return r.send(ctx, verb, url, "", nil)
	case "GET", "DELETE":
		data, err := object(body, typeMeta{})
		if err != nil {
			return answer{}, err
		}
		return r.send(ctx, verb, url, contentType, data)
	case "EDIT":
		return r.edit(ctx, url, body)
	case "MERGE":
		verb, contentType, kind = "PATCH", "application/merge-patch+json", typeMeta{}
	case "STRATEGIC":
		verb, contentType, kind = "PATCH", "application/strategic-merge-patch+json", typeMeta{}
	case "JSONPATCH":
		verb, contentType, kind = "PATCH", "application/json-patch+json", typeMeta{}
	case "APPLY":
		verb, contentType = "PATCH", "application/apply-patch+yaml"
	}
	data, err := object(body, kind)
	if err != nil {
		return answer{}, err
	}
	a, err := r.send(ctx, verb, url, contentType, data)
	if a.code == http.StatusCreated {
		r.remember(s, url, a)
	}
	return a, err
}

// remember notes what a POST, PUT or APPLY created.
func (r *run) remember(s *Step, url string, a answer) {
	path, _, _ := strings.Cut(url, "?")
	if s.Verb == "POST" {
		name, _ := lookup(a.object, ".metadata.name")
		path += "/" + fmt.Sprint(name)
	}
	r.created = append(r.created, path)
}

func (r *run) cleanUp(ctx context.Context) {
	slices.Reverse(r.created)
	for _, path := range append(r.created, "/api/v1/namespaces/"+r.vars["NS"]) {
		_, _ = r.send(ctx, "MERGE", path, "application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))
		_, _ = r.send(ctx, "DELETE", path+"?gracePeriodSeconds=0", "application/json", nil)
	}
}

// editTries bounds how often an edit is repeated because another client, a
// controller, wrote in between.
const editTries = 10

// edit reads the object, merges the change into it and writes it back, as
// a user with an editor would.
func (r *run) edit(ctx context.Context, url, body string) (a answer, err error) {
	for range editTries {
		if a, err = r.tryEdit(ctx, url, body); err != nil || a.code != http.StatusConflict {
			return a, err
		}
	}
	return a, err
}

func (r *run) tryEdit(ctx context.Context, url, body string) (answer, error) {
	a, err := r.send(ctx, "GET", url, "", nil)
	if err != nil || a.code != http.StatusOK {
		return a, err
	}
	var change any
	if err := yaml.Unmarshal([]byte(body), &change); err != nil {
		return answer{}, err
	}
	data, err := json.Marshal(merge(a.object, change))
	if err != nil {
		return answer{}, err
	}
	return r.send(ctx, "PUT", url, "application/json", data)
}

// merge is RFC 7386.
func merge(into, change any) any {
	m, ok := change.(map[string]any)
	if !ok {
		return change
	}
	out, ok := into.(map[string]any)
	if !ok {
		out = map[string]any{}
	}
	for k, v := range m {
		if v == nil {
			delete(out, k)
		} else {
			out[k] = merge(out[k], v)
		}
	}
	return out
}

func (r *run) send(ctx context.Context, verb, path, contentType string, body []byte) (answer, error) {
	accept := "application/json"
	switch verb {
	case "MERGE":
		verb = "PATCH"
	case "TABLE":
		verb, accept = "GET", acceptTable
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, verb, r.base+path, bytes.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	req.Header.Set("Accept", accept)
	req.Header.Set("User-Agent", "corpus") // becomes the manager of what is written
	if len(body) > 0 {
		req.Header.Set("Content-Type", contentType)
	}
	resp, err := r.client.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	a := answer{code: resp.StatusCode}
	if a.body, err = io.ReadAll(resp.Body); err != nil {
		return answer{}, err
	}
	_ = json.Unmarshal(a.body, &a.object) // not everything answers JSON
	warnings, _ := utilnet.ParseWarningHeaders(resp.Header["Warning"])
	for _, w := range warnings {
		a.warnings = append(a.warnings, w.Text)
	}
	return a, nil
}

var variable = regexp.MustCompile(`\$[A-Z][A-Z0-9]*`)

// expand replaces $NAME by what was saved under the name; $NS is the namespace
// of the case. $ATIMES300 is a string of 300 letters a.
func (r *run) expand(s string) string {
	return variable.ReplaceAllStringFunc(s, func(v string) string {
		if n, ok := strings.CutPrefix(v, "$ATIMES"); ok {
			if count, err := strconv.Atoi(n); err == nil {
				return strings.Repeat("a", count)
			}
		}
		if value, ok := r.vars[v[1:]]; ok {
			return value
		}
		return v
	})
}

// compare returns what in a is not as s expects it.
func (r *run) compare(s *Step, a answer) (out []string) {
	if a.code != s.Code {
		return []string{fmt.Sprintf("code %d, want %d: %s", a.code, s.Code, message(a))}
	}
	if a.code == http.StatusUnprocessableEntity {
		out = append(out, compareCauses(s, causes(a))...)
	}
	out = append(out, compareWarnings(s.Warnings, a.warnings)...)
	for _, c := range s.Checks {
		if d := r.check(c, a.object); d != "" {
			out = append(out, fmt.Sprintf("line %d: %s %s", c.Line, c.Path, d))
		}
	}
	return out
}

func message(a answer) string {
	if m, ok := lookup(a.object, ".message"); ok {
		return fmt.Sprint(m)
	}
	return string(a.body)
}

func causes(a answer) []string {
	var status metav1.Status
	if json.Unmarshal(a.body, &status) != nil || status.Details == nil {
		return nil
	}
	var out []string
	for _, c := range status.Details.Causes {
		reason := string(c.Type)
		for short, long := range reasons {
			if long == reason {
				reason = short
			}
		}
		out = append(out, reason+" "+c.Field)
	}
	return out
}

func compareCauses(s *Step, got []string) (out []string) {
	rest := slices.Clone(got)
	for _, w := range s.Causes {
		if i := slices.Index(rest, w); i >= 0 {
			rest = slices.Delete(rest, i, i+1)
		} else {
			out = append(out, fmt.Sprintf("no cause %q among %q", w, got))
		}
	}
	if !s.MoreCauses {
		for _, g := range rest {
			out = append(out, fmt.Sprintf("unexpected cause %q", g))
		}
	}
	return out
}

func compareWarnings(want, got []string) (out []string) {
	rest := slices.Clone(got)
	for _, w := range want {
		re, err := regexp.Compile(w)
		if err != nil {
			return []string{err.Error()}
		}
		if i := slices.IndexFunc(rest, re.MatchString); i >= 0 {
			rest = slices.Delete(rest, i, i+1)
		} else {
			out = append(out, fmt.Sprintf("no warning %q among %q", w, got))
		}
	}
	for _, g := range rest {
		out = append(out, fmt.Sprintf("unexpected warning %q", g))
	}
	return out
}

func (r *run) check(c Check, object any) string {
	got, there := lookup(object, c.Path)
	switch c.Op {
	case "absent":
		if there {
			return fmt.Sprintf("is %v, want it absent", got)
		}
		return ""
	case "present":
		if !there {
			return "is absent"
		}
		return ""
	case "save":
		r.vars[c.Want] = fmt.Sprint(got)
		return ""
	}
	if !there {
		return fmt.Sprintf("is absent, want %s", c.Want)
	}
	want := r.expand(c.Want)
	if c.Op == "~" {
		if ok, err := regexp.MatchString(want, fmt.Sprint(got)); err != nil || !ok {
			return fmt.Sprintf("is %v, want it to match %s", got, want)
		}
		return ""
	}
	var value any
	if err := yaml.Unmarshal([]byte(want), &value); err != nil {
		return err.Error()
	}
	if !reflect.DeepEqual(got, value) {
		text, _ := json.Marshal(got)
		return fmt.Sprintf("is %s, want %s", text, want)
	}
	return ""
}

var segment = regexp.MustCompile(`^(?:\.([A-Za-z0-9$_-]+|#)|\[(\d+)\]|\["([^"]+)"\])`)

// lookup finds the field at a path such as .spec.ports[0].name,
// .metadata.labels["a.b/c"], or .spec.ports.# for how many there are.
func lookup(v any, path string) (any, bool) {
	for path != "" {
		m := segment.FindStringSubmatch(path)
		if m == nil {
			return nil, false
		}
		path = path[len(m[0]):]
		key := m[1] + m[3]
		switch t := v.(type) {
		case map[string]any:
			next, ok := t[key]
			if !ok {
				return nil, false
			}
			v = next
		case []any:
			if key == "#" {
				v = float64(len(t))
				continue
			}
			i, err := strconv.Atoi(m[2])
			if err != nil || i >= len(t) {
				return nil, false
			}
			v = t[i]
		default:
			return nil, false
		}
	}
	return v, true
}
