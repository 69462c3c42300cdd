package nginx

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/gateway/hostpath"
	"github.com/fairlead/fairlead/internal/gateway/policy"
)

// Auth is the port of a Service that is asked whether requests may pass.
type Auth struct {
	// Namespace is "" for that of the Ingress.
	Service, Namespace string
	Port               uint16
	TLS                bool
	// Own means that the Service is the one that the request's own host has at the path of Target.
	Own bool
	// Host and Target, which is a path with a query, are for its requests, and so is Method, "" for GET.
	Host, Target, Method string
	// Fields are the names of the fields of its answers that Pods get.
	Fields []string
	policy.NginxAuth
}

// wantAuth is which addresses can be asked. A name outside of the cluster could lead to any address, also to one of a node.
const wantAuth = "want http:// or https:// and a Service, as http://auth.NAMESPACE.svc/path, or $host, as https://$host/path"

// ownHost is an address of the host that the client has asked for.
var ownHost = regexp.MustCompile(`^https?://\$(?:host|http_host|best_http_host)((?:[/?].*)?)$`)

// readAuthURL reads the address of a Service: NAME.NAMESPACE.svc, with the cluster's domain or without, or NAME.
func readAuthURL(r *reader, v string) error {
	if v == "" {
		return nil
	}
	if own := ownHost.FindStringSubmatch(v); own != nil {
		path, query, has := strings.Cut(own[1], "?")
		canonical, ok := hostpath.Path(cmp.Or(path, "/"))
		if !ok || checkURL("http://own"+own[1]) != nil || strings.ContainsAny(own[1], "$#") {
			return fmt.Errorf("%q cannot be asked: want a path of the host that all servers read alike, without variables", shorten(v))
		}
		if r.auth.Own, r.auth.Target = true, canonical; has {
			r.auth.Target += "?" + query
		}
		return nil
	}
	u, err := url.Parse(v)
	if err != nil || strings.Contains(v, "$") || checkURL(v) != nil || u.Host == "" || u.Fragment != "" {
		return fmt.Errorf("%q cannot be asked: %s", shorten(v), wantAuth)
	}
	a := &r.auth
	labels := strings.Split(strings.TrimSuffix(strings.ToLower(u.Hostname()), "."), ".")
	switch {
	case len(labels) == 1:
	case len(labels) >= 3 && labels[2] == "svc": // whatever the domain of the cluster is, no name is resolved
		a.Namespace = labels[1]
	default:
		return fmt.Errorf("%q is no Service of this cluster: %s", shorten(u.Hostname()), wantAuth)
	}
	if a.Service = labels[0]; !isHost(a.Service) || len(labels) > 1 && !isHost(a.Namespace) {
		return fmt.Errorf("%q is no Service of this cluster: %s", shorten(u.Hostname()), wantAuth)
	}
	if a.TLS, a.Port = u.Scheme == "https", 80; a.TLS {
		a.Port = 443
	}
	if text := u.Port(); text != "" {
		n, err := strconv.ParseUint(text, 10, 16)
		if err != nil || n == 0 {
			return fmt.Errorf("%q is no port", shorten(text))
		}
		a.Port = uint16(n)
	}
	a.Host, a.Target = u.Host, u.RequestURI()
	return nil
}

var parameter = regexp.MustCompile(`^[-_.A-Za-z0-9]{1,64}$`)

var variable = regexp.MustCompile(`\$(\{|[a-z_0-9]*)`)

// checkVariables returns why a text has a variable of nginx that does not exist here.
func checkVariables(v string) error {
	for _, name := range variable.FindAllString(v, -1) {
		if !slices.Contains(policy.Variables, name) {
			return fmt.Errorf("the variable %q does not exist here; want one of %s", shorten(name), strings.Join(policy.Variables, " "))
		}
	}
	return nil
}

// checkPlace returns why a text with variables is no place to send a browser to.
func checkPlace(v string) error {
	if err := checkVariables(v); err != nil {
		return err
	}
	if strings.HasPrefix(v, "$request_uri") {
		return errors.New("it sends clients to where they are")
	}
	return checkURL(policy.Fill(v, "https", "example.com", "/"))
}

func addAuth(all map[string]annotation) {
	all["auth-url"] = annotation{read: readAuthURL, guards: true}
	add := func(name string, guards bool, read func(*reader, string) error) {
		all[name] = annotation{read: read, needs: "auth-url", guards: guards}
	}
	add("auth-method", true, func(r *reader, v string) error {
		r.auth.Method = v
		if !slices.Contains([]string{
			http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions,
		}, v) {
			return fmt.Errorf("%q is not one of GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS", shorten(v))
		}
		return nil
	})
	add("auth-signin", true, func(r *reader, v string) error {
		r.auth.SignIn = v
		return checkPlace(v)
	})
	add("auth-signin-redirect-param", true, func(r *reader, v string) error {
		if r.auth.RedirectParam = v; !parameter.MatchString(v) {
			return fmt.Errorf("%q is not the name of a parameter", shorten(v))
		}
		return nil
	})
	add("auth-request-redirect", true, func(r *reader, v string) error {
		r.auth.Redirect = v
		return checkVariables(v)
	})
	add("auth-response-headers", true, func(r *reader, v string) error {
		for _, name := range list(v) {
			if checkToken(name) != nil {
				return fmt.Errorf("%q is not the name of a header field", shorten(name))
			}
			r.auth.Fields = append(r.auth.Fields, strings.ToLower(name))
		}
		if len(r.auth.Fields) > maxNames {
			return fmt.Errorf("it has more than %d names", maxNames)
		}
		return nil
	})
	add("auth-always-set-cookie", false, flag(func(r *reader, on bool) { r.auth.AlwaysCookie = on }))
	const asked = "each request is asked about: no answer is kept"
	const kept = "connections are kept as to Pods"
	for name, why := range map[string]string{
		"auth-cache-key": asked, "auth-cache-duration": asked, "auth-keepalive": kept, "auth-keepalive-share-vars": kept,
		"auth-keepalive-requests": kept, "auth-keepalive-timeout": kept,
		"auth-proxy-set-headers": "no ConfigMap is read; all fields of the request are sent",
	} {
		all[name] = annotation{none: why}
	}
}

// Basic is which Secret has the names and passwords of clients.
type Basic struct {
	// Namespace is "" for that of the Ingress.
	Secret, Namespace string
	// Map is true if its entries are hashes by name, else its entry "auth" is a file of htpasswd.
	Map   bool
	Realm string
}

var realm = regexp.MustCompile(`^[ !#-\[\]-~]{1,200}$`) // printable ASCII without quotes and backslashes

func addBasic(all map[string]annotation) {
	all["auth-type"] = annotation{guards: true, read: func(_ *reader, v string) error {
		if v != "basic" && v != "" {
			return fmt.Errorf("%q is not basic", shorten(v))
		}
		return nil
	}}
	all["auth-secret"] = annotation{guards: true, read: func(r *reader, v string) error {
		namespace, name, both := strings.Cut(v, "/")
		switch {
		case v != "" && r.value("auth-type") == "":
			return errors.New("it protects nothing without auth-type")
		case !both:
			name, namespace = v, ""
		case !isHost(namespace) || name == "":
			return fmt.Errorf("%q is not the name of a Secret", shorten(v))
		}
		if r.basic.Secret, r.basic.Namespace = name, namespace; name != "" && !isHost(name) {
			return fmt.Errorf("%q is not the name of a Secret", shorten(v))
		}
		return nil
	}}
	add := func(name string, read func(*reader, string) error) {
		all[name] = annotation{read: read, needs: "auth-type", guards: true}
	}
	add("auth-secret-type", func(r *reader, v string) error {
		if r.basic.Map = v == "auth-map"; !r.basic.Map && v != "auth-file" {
			return fmt.Errorf("%q is not one of auth-file, auth-map", shorten(v))
		}
		return nil
	})
	add("auth-realm", func(r *reader, v string) error {
		if r.basic.Realm = v; !realm.MatchString(v) {
			return fmt.Errorf("%q is not a text of ASCII without quotes", shorten(v))
		}
		return nil
	})
}

// combineBasic adds the defaults of ingress-nginx.
func (r *reader) combineBasic() {
	if r.value("auth-type") == "" {
		return
	}
	if r.basic.Secret == "" {
		r.close("auth-type", "auth-secret is missing")
	}
	r.basic.Realm = orElse(r.basic.Realm, "Authentication Required")
	r.Basic = &r.basic
}

// combineAuth adds the defaults of ingress-nginx.
func (r *reader) combineAuth() {
	if r.value("auth-url") == "" {
		return
	}
	if r.auth.RedirectParam == "" {
		r.auth.RedirectParam = "rd"
	}
	r.auth.Redirect = orElse(r.auth.Redirect, "$request_uri")
	r.Auth = &r.auth
}
