package filter

import (
	"fmt"
	"regexp"
	"strings"

	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway/hostpath"
)

// Rewrite changes the host and the path of a request.
type Rewrite struct {
	Host string // "" leaves it
	Path *PathChange
}

// PathChange replaces a path, or the prefix that a rule was found by.
type PathChange struct {
	Whole bool
	To    string
	// Groups, if not nil, takes the whole path. Then To has $1 to $9 for its groups.
	Groups *regexp.Regexp
}

// Apply returns the new path, "" if it would be one that servers read in different ways. prefix is the one that the rule was
// found by.
func (c *PathChange) Apply(path, prefix string) string {
	if c == nil {
		return path
	}
	if c.Groups != nil {
		return c.expand(path)
	}
	if c.Whole {
		return c.To
	}
	rest := path[min(len(prefix), len(path)):]
	to := c.To
	if to != "" && to[len(to)-1] == '/' && (rest == "" || rest[0] == '/') {
		to = to[:len(to)-1]
		if rest == "" && to == "" {
			return "/"
		}
		if rest == "" {
			return c.To
		}
	}
	if to += rest; to == "" || to[0] != '/' {
		return "/" + to
	}
	return to
}

// expand returns To with the groups of a path. A group can be a part of an encoded byte, or begin with a slash.
func (c *PathChange) expand(path string) string {
	at := c.Groups.FindStringSubmatchIndex(path)
	var out strings.Builder
	for i := 0; i < len(c.To); i++ {
		if c.To[i] != '$' || i+1 == len(c.To) || c.To[i+1] < '0' || c.To[i+1] > '9' {
			out.WriteByte(c.To[i])
			continue
		}
		i++
		if n := 2 * int(c.To[i]-'0'); n+1 < len(at) && at[n] >= 0 {
			out.WriteString(path[at[n]:at[n+1]])
		}
	}
	canonical, _ := hostpath.Path(out.String())
	return canonical
}

// ReadRewrite reads a change of the host and the path. wrong names the first invalid field.
func ReadRewrite(spec *gwv1.HTTPURLRewriteFilter) (r Rewrite, wrong string) {
	if spec.Hostname != nil {
		r.Host = strings.ToLower(string(*spec.Hostname))
	}
	r.Path, wrong = readPath(spec.Path)
	return r, wrong
}

// readPath reads a change of a path, nil without one.
func readPath(spec *gwv1.HTTPPathModifier) (c *PathChange, wrong string) {
	if spec == nil {
		return nil, ""
	}
	c = &PathChange{Whole: spec.Type == gwv1.FullPathHTTPPathModifier, To: "/"}
	to := spec.ReplacePrefixMatch
	if c.Whole {
		to = spec.ReplaceFullPath
	}
	if to != nil {
		c.To = *to
	}
	if c.To == "" || c.To[0] != '/' {
		c.To = "/" + c.To
	}
	canonical, ok := hostpath.Path(c.To)
	if !ok || strings.ContainsAny(c.To, " ?#") || strings.ContainsFunc(c.To, func(r rune) bool { return r <= ' ' || r >= 0x7f }) {
		wrong = fmt.Sprintf("path: %.100q is no path that all servers read alike", c.To)
	}
	c.To = canonical
	return c, wrong
}
