package nginx

import (
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/policy"
)

type prefix = netip.Prefix

func second(n int) time.Duration { return time.Duration(n) * time.Second }

// shorten bounds a value in a message.
func shorten(v string) string {
	const most = 60
	if len(v) <= most {
		return v
	}
	return v[:most] + "…"
}

// readSatisfy reads whether a client has to pass all of what protects the paths, or any.
func readSatisfy(r *reader, v string) error {
	if r.Any = v == "any"; v != "any" && v != "all" && v != "" {
		return fmt.Errorf("%q is not one of all, any", shorten(v))
	}
	return nil
}

func flag(set func(*reader, bool)) func(*reader, string) error {
	return func(r *reader, v string) error {
		on, err := strconv.ParseBool(v)
		if err != nil {
			return fmt.Errorf("%q is neither true nor false", shorten(v))
		}
		set(r, on)
		return nil
	}
}

func number(least, most int, set func(*reader, int)) func(*reader, string) error {
	return func(r *reader, v string) error {
		n, err := strconv.Atoi(v)
		if err != nil || n < least || n > most {
			return fmt.Errorf("%q is not a number from %d to %d", shorten(v), least, most)
		}
		set(r, n)
		return nil
	}
}

// seconds reads a number of seconds, up to a week.
func seconds(set func(*reader, int)) func(*reader, string) error { return number(1, 7*24*3600, set) }

// list splits a value at commas and leaves empty items out.
func list(v string) (out []string) {
	for item := range strings.FieldsFuncSeq(v, func(c rune) bool { return c == ',' || c == '\n' }) {
		if item = strings.TrimSpace(item); item != "" {
			out = append(out, item)
		}
	}
	return out
}

// names reads a list of names.
func names[T ~string](valid *regexp.Regexp, set func(*reader, []T)) func(*reader, string) error {
	return func(r *reader, v string) error {
		var out []T
		for _, n := range list(v) {
			if !valid.MatchString(n) {
				return fmt.Errorf("%q is not a name for this list", shorten(n))
			}
			out = append(out, T(n))
		}
		if len(out) > maxNames {
			return fmt.Errorf("it has more than %d names", maxNames)
		}
		set(r, out)
		return nil
	}
}

var (
	pathText = regexp.MustCompile(`^/[-._~a-zA-Z0-9/:$]*$`)
	hostName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
	token    = regexp.MustCompile("^[-!#$%&'*+.^_`|~0-9A-Za-z]+$")
	size     = regexp.MustCompile(`^([0-9]{1,9})([bkmgBKMG]?)$`)
)

const maxHost = 253 // bytes, of DNS

func isHost(v string) bool { return len(v) <= maxHost && hostName.MatchString(v) }

func readRewrite(r *reader, v string) error {
	if v == "" {
		return nil
	}
	if !pathText.MatchString(v) {
		return fmt.Errorf("%q is not a path of letters, digits and -._~/:, with $1 to $9 for groups of the path", shorten(v))
	}
	r.RewriteTarget = v
	return nil
}

func readAppRoot(r *reader, v string) error {
	err := checkPath(v)
	switch {
	case err != nil:
		return err
	case v == "/":
		return errors.New("it sends clients to where they are")
	}
	r.AppRoot = v
	return nil
}

// checkPath returns why a text is no path.
func checkPath(v string) error {
	if !pathText.MatchString(v) || strings.ContainsRune(v, '$') {
		return fmt.Errorf("%q is not a path: want letters, digits, and -._~/: after a slash", shorten(v))
	}
	return nil
}

func readForwardedPrefix(r *reader, v string) error {
	err := checkPath(v)
	if err == nil {
		r.ForwardedPrefix = v
	}
	return err
}

// readDefaultBackend reads the name of a Service.
func readDefaultBackend(r *reader, v string) error {
	if problems := validation.IsDNS1035Label(v); len(problems) > 0 {
		return fmt.Errorf("%q is no name of a Service", shorten(v))
	}
	r.DefaultBackend = v
	return nil
}

// readErrors reads the statuses of answers that the default backend answers in place of.
func readErrors(r *reader, v string) error {
	var codes []int
	for _, text := range list(v) {
		code, err := strconv.Atoi(text)
		if err != nil || code < policy.LeastError || code > policy.MostError {
			return fmt.Errorf("%q is not a status from %d to %d", shorten(text), policy.LeastError, policy.MostError)
		}
		if !slices.Contains(codes, code) {
			codes = append(codes, code)
		}
	}
	if len(codes) == 0 {
		return fmt.Errorf("want statuses from %d to %d with commas between, as 404,503", policy.LeastError, policy.MostError)
	}
	r.errors.Codes = codes
	return nil
}

func readBackendHost(r *reader, v string) error {
	if v = strings.ToLower(v); !isHost(v) {
		return fmt.Errorf("%q is not a host name; variables of nginx do not exist here", shorten(v))
	}
	r.BackendHost = v
	return nil
}

// readAliases reads further hosts, as many as are names: nginx also takes regular expressions.
func readAliases(r *reader, v string) error {
	all := list(v)
	if len(all) > maxNames {
		return fmt.Errorf("it has more than %d hosts", maxNames)
	}
	for _, a := range all {
		if a = strings.ToLower(a); !isHost(strings.TrimPrefix(a, "*.")) {
			r.ignore("server-alias", "%q is not a host name, and has no effect", shorten(a))
			continue
		}
		r.Aliases = append(r.Aliases, a)
	}
	return nil
}

func readBackend(r *reader, v string) error {
	switch strings.ToUpper(v) {
	case "HTTP", "AUTO_HTTP":
	case "HTTPS":
		r.Backend = Backend{TLS: true}
	case "GRPC":
		r.Backend = Backend{GRPC: true}
	case "GRPCS":
		r.Backend = Backend{TLS: true, GRPC: true}
	default:
		return fmt.Errorf("%q is not one of HTTP, HTTPS, GRPC, GRPCS", shorten(v))
	}
	return nil
}

// defaultBody is the bound of bodies that ingress-nginx has for a value that it does not understand.
const defaultBody = 1 << 20

func readBody(r *reader, v string) error {
	m := size.FindStringSubmatch(v)
	if m == nil {
		r.Body = defaultBody
		return fmt.Errorf("%q is not a size such as 8m; the bound is 1m, as in ingress-nginx", shorten(v))
	}
	n, err := strconv.ParseInt(m[1], 10, 64)
	r.Body = n << map[string]int{"k": 10, "m": 20, "g": 30}[strings.ToLower(m[2])]
	return err
}

// readRanges reads networks and addresses.
func readRanges(of func(*Options) *[]prefix) func(*reader, string) error {
	return func(r *reader, v string) error {
		items := list(v)
		if len(items) == 0 || len(items) > maxRanges {
			return fmt.Errorf("want 1 to %d networks with commas between", maxRanges)
		}
		var out []prefix
		for _, item := range items {
			p, err := netip.ParsePrefix(item)
			if err != nil {
				a, err := netip.ParseAddr(item)
				if err != nil || a.Zone() != "" {
					return fmt.Errorf("%q is not a network such as 192.0.2.0/24", shorten(item))
				}
				p = netip.PrefixFrom(a, a.BitLen())
			}
			if p.Addr().Is4In6() {
				return fmt.Errorf("%q is an IPv4 address in the form of IPv6; want its own form", shorten(item))
			}
			out = append(out, p.Masked())
		}
		*of(r.Options) = append(*of(r.Options), out...)
		return nil
	}
}

// readWhitelist reads the older name of allowlist-source-range, which is ignored where an Ingress has both.
func readWhitelist(r *reader, v string) error {
	if _, both := r.all[Prefix+"allowlist-source-range"]; both {
		r.ignore("whitelist-source-range", "it has no effect beside allowlist-source-range")
		return nil
	}
	return readRanges(func(o *Options) *[]prefix { return &o.Allow })(r, v)
}

func addRedirects(all map[string]annotation) {
	for kind, most := range map[string]int{"temporal-redirect": 307, "permanent-redirect": 308} {
		all[kind] = annotation{guards: true, redirects: true, read: func(r *reader, v string) error {
			if err := checkURL(v); err != nil {
				return err
			}
			if r.to == nil {
				r.to = map[string]string{}
			}
			r.to[kind] = v
			return nil
		}}
		all[kind+"-code"] = annotation{needs: kind, read: number(300, most, func(r *reader, n int) {
			if r.status == nil {
				r.status = map[string]int{}
			}
			r.status[kind] = n
		})}
	}
}

// checkURL returns why a text is no place to send clients to: a scheme and a host with what follows, or a path.
func checkURL(v string) error {
	u, err := url.Parse(v)
	switch {
	case err != nil, strings.ContainsFunc(v, func(c rune) bool { return c <= ' ' || c >= 0x7f || strings.ContainsRune("$\"\\<>^`{|}", c) }):
		return fmt.Errorf("%q is not the address of a page", shorten(v))
	case u.Scheme == "" && strings.HasPrefix(v, "/") && !strings.HasPrefix(v, "//"):
		return nil
	case u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil:
		return fmt.Errorf("%q does not begin with http:// or https:// and a host, nor with a /", shorten(v))
	}
	return nil
}

func addCORS(all map[string]annotation) {
	add := func(name string, read func(*reader, string) error) {
		all[name] = annotation{read: read, needs: "enable-cors"}
	}
	all["enable-cors"] = annotation{read: flag(func(r *reader, on bool) { r.hasCORS = on })}
	origin := regexp.MustCompile(`^(\*|[a-z]+://(\*\.)?[-A-Za-z0-9.]+(:[0-9]+)?)$`)
	readOrigins := func(r *reader, v string) error {
		all := list(v)
		if len(all) > maxNames {
			return fmt.Errorf("it has more than %d origins", maxNames)
		}
		for _, o := range all {
			if !origin.MatchString(o) {
				r.ignore("cors-allow-origin", "%q is not an origin such as https://example.com, and has no effect", shorten(o))
				continue
			}
			r.cors.AllowOrigins = append(r.cors.AllowOrigins, gwv1.CORSOrigin(o))
		}
		return nil
	}
	all["cors-allow-origin"] = annotation{read: readOrigins, needs: "enable-cors", long: true}
	add("cors-allow-methods", names(regexp.MustCompile("^[A-Za-z]+$"), func(r *reader, v []gwv1.HTTPMethodWithWildcard) {
		r.cors.AllowMethods = v
	}))
	add("cors-allow-headers", names(token, func(r *reader, v []gwv1.HTTPHeaderName) { r.cors.AllowHeaders = v }))
	add("cors-expose-headers", names(token, func(r *reader, v []gwv1.HTTPHeaderName) { r.cors.ExposeHeaders = v }))
	add("cors-allow-credentials", flag(func(r *reader, on bool) { r.credentials = on }))
	add("cors-max-age", number(1, 1<<31-1, func(r *reader, n int) { r.cors.MaxAge = int32(n) })) //nolint:gosec // bounded
}

func addSessions(all map[string]annotation) {
	add := func(name string, read func(*reader, string) error) {
		all[name] = annotation{read: read, needs: "affinity"}
	}
	all["affinity"] = annotation{read: func(_ *reader, v string) error {
		if v != "cookie" {
			return fmt.Errorf("%q is not cookie", shorten(v))
		}
		return nil
	}}
	add("session-cookie-name", func(r *reader, v string) error {
		if len(v) > 200 || !token.MatchString(v) {
			return fmt.Errorf("%q cannot be the name of a cookie", shorten(v))
		}
		r.session.Name = v
		return nil
	})
	life := seconds(func(r *reader, n int) {
		r.session.Absolute, r.session.Permanent = max(r.session.Absolute, second(n)), true
	})
	add("session-cookie-expires", life)
	add("session-cookie-max-age", life)
	add("session-cookie-path", func(r *reader, v string) error {
		err := checkPath(v)
		if err == nil {
			r.session.Path = v
		}
		return err
	})
	add("session-cookie-domain", func(r *reader, v string) error {
		if !isHost(strings.ToLower(strings.TrimPrefix(v, "."))) {
			return fmt.Errorf("%q is not a host name", shorten(v))
		}
		r.session.Domain = strings.ToLower(strings.TrimPrefix(v, "."))
		return nil
	})
	add("session-cookie-samesite", func(r *reader, v string) error {
		for _, known := range []string{"None", "Lax", "Strict"} {
			if strings.EqualFold(v, known) {
				r.session.SameSite = known
				return nil
			}
		}
		return fmt.Errorf("%q is not one of None, Lax, Strict", shorten(v))
	})
	add("session-cookie-secure", flag(func(r *reader, on bool) { r.session.Secure = on }))
	add("affinity-mode", func(_ *reader, v string) error {
		if v != "persistent" {
			return errors.New("sessions stay where they are: persistent")
		}
		return nil
	})
	add("affinity-canary-behavior", func(_ *reader, v string) error {
		if v != "sticky" {
			return errors.New("sessions stay at the canary that has served them: sticky")
		}
		return nil
	})
	add("session-cookie-change-on-failure", flag(func(*reader, bool) {}))
	all["session-cookie-conditional-samesite-none"] = annotation{none: "only browsers of before 2020 need it"}
}

func addCanaries(all map[string]annotation) {
	all["canary"] = annotation{read: flag(func(r *reader, on bool) { r.isCanary = on }), guards: true}
	add := func(name string, read func(*reader, string) error) {
		all[name] = annotation{read: read, needs: "canary", guards: true}
	}
	add("canary-by-header", func(r *reader, v string) error {
		r.canary.Header = strings.ToLower(v)
		return checkToken(v)
	})
	add("canary-by-header-value", func(r *reader, v string) error {
		r.canary.Value = v
		return nil
	})
	add("canary-by-header-pattern", func(r *reader, v string) error {
		r.canary.Pattern = v
		return nil
	})
	add("canary-by-cookie", func(r *reader, v string) error {
		r.canary.Cookie = v
		return checkToken(v)
	})
	add("canary-weight", number(0, 1<<20, func(r *reader, n int) { r.canary.Weight = n }))
	add("canary-weight-total", number(1, 1<<20, func(r *reader, n int) { r.canary.Total = n }))
}

func checkToken(v string) error {
	if len(v) > 200 || !token.MatchString(v) {
		return fmt.Errorf("%q is not the name of a header field or of a cookie", shorten(v))
	}
	return nil
}

// How often a request is sent, with the first time, in ingress-nginx, and at most here: there 0 means without a bound.
const defaultTries, maxTries = 3, 10

// defaultBurst is how many times its bound of a second or minute a client may have at once, as in ingress-nginx.
const defaultBurst = 5

func addRetries(all map[string]annotation) {
	tries := func(r *reader, n int) {
		if r.retries = true; r.retry.Attempts == nil || *r.retry.Attempts > 0 {
			r.retry.Attempts = new(n - 1)
		}
	}
	all["proxy-next-upstream"] = annotation{read: func(r *reader, v string) error {
		var codes []gwv1.HTTPRouteRetryStatusCode
		most := defaultTries
		for _, word := range strings.Fields(v) {
			code, is := strings.CutPrefix(word, "http_")
			n, err := strconv.Atoi(code)
			switch {
			case word == "off":
				most = 1
			case word == "error" || word == "timeout" || word == "invalid_header":
			case word == "non_idempotent":
				r.ignore("proxy-next-upstream", "non_idempotent has no effect: such a request is not sent twice")
			case !is || err != nil || n < 400 || n > 599:
				return fmt.Errorf("%q is not one of error, timeout, invalid_header, http_500 and the like, off", shorten(word))
			default:
				codes = append(codes, gwv1.HTTPRouteRetryStatusCode(n))
			}
		}
		r.retry.Codes = codes
		tries(r, most)
		return nil
	}}
	all["proxy-next-upstream-tries"] = annotation{read: number(0, 100, func(r *reader, n int) {
		if n == 0 || n > maxTries {
			n = maxTries
		}
		tries(r, n)
	})}
	all["proxy-next-upstream-timeout"] = annotation{read: number(0, 24*3600, func(r *reader, n int) {
		r.RetryWithin = second(n)
		if r.retry.Attempts == nil {
			tries(r, defaultTries)
		}
	})}
}
