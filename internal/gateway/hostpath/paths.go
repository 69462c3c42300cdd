package hostpath

import (
	"strings"
)

// Path returns the one form of a path that rules are compared with and that backends get: percent-encoded
// unreserved bytes are decoded (RFC 3986, section 6.2.2.2), empty segments are left out, and dot segments are resolved.
// Other encoded bytes stay encoded, with upper-case digits. ok is false for a path that servers are known to read in
// different ways, so that a request could reach what another rule protects: one with an encoded NUL, an invalid encoding, a
// backslash, or a dot segment that only some servers see ("..;x", "%2f..").
func Path(path string) (canonical string, ok bool) {
	if plainPath(path) {
		return path, true
	}
	decoded, ok := decodeUnreserved(path)
	if !ok || !strings.HasPrefix(decoded, "/") {
		return "", false
	}
	segments := strings.Split(decoded[1:], "/")
	out := make([]string, 0, len(segments))
	for i, s := range segments {
		last := i == len(segments)-1
		switch {
		case disputed(s):
			return "", false
		case s == "..":
			if len(out) > 0 {
				out = out[:len(out)-1]
			}
		case s != "." && s != "":
			out = append(out, s)
			continue
		}
		if last {
			out = append(out, "") // a directory: the slash at the end stays
		}
	}
	return "/" + strings.Join(out, "/"), true
}

// plainPath reports whether a path is canonical because nothing in it is special. A false result means nothing.
func plainPath(path string) bool {
	if path == "" || path[0] != '/' {
		return false
	}
	for i := 0; i < len(path); i++ {
		switch c := path[i]; {
		case c == '%', c == '\\', c <= ' ', c >= 0x7f:
			return false
		case c == '/' && i+1 < len(path) && (path[i+1] == '/' || path[i+1] == '.'):
			return false
		}
	}
	return true
}

// Beginning returns the text that each path begins with that a server could read in a path of a rule that Path does not take.
func Beginning(path string) string {
	if strings.Contains(path, "..") || strings.Contains(strings.ToLower(path), "%2e") {
		return "/" // it could lead anywhere
	}
	for end := len(path); end > 0; end-- {
		if plainPath(path[:end]) {
			return path[:end]
		}
	}
	return "/"
}

// decodeUnreserved decodes the unreserved bytes. ok is false where the encoding is invalid or hides a NUL.
func decodeUnreserved(path string) (out string, ok bool) {
	var b strings.Builder
	b.Grow(len(path))
	for i := 0; i < len(path); i++ {
		c := path[i]
		if c == 0 || c == '\\' {
			return "", false
		}
		if c != '%' {
			b.WriteByte(c)
			continue
		}
		v, valid := hexByte(path, i+1)
		if !valid || v == 0 {
			return "", false
		}
		if unreserved(v) {
			b.WriteByte(v)
		} else {
			b.WriteByte('%')
			b.WriteByte(digits[v>>4])
			b.WriteByte(digits[v&15])
		}
		i += 2
	}
	return b.String(), true
}

const digits = "0123456789ABCDEF"

func hexByte(s string, at int) (v byte, ok bool) {
	if at+2 > len(s) {
		return 0, false
	}
	for _, c := range []byte(s[at : at+2]) {
		switch {
		case c >= '0' && c <= '9':
			v = v<<4 | (c - '0')
		case c|0x20 >= 'a' && c|0x20 <= 'f':
			v = v<<4 | (c | 0x20 - 'a' + 10)
		default:
			return 0, false
		}
	}
	return v, true
}

func unreserved(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '.' || c == '_' || c == '~'
}

// disputed reports whether only some servers see a dot segment in a segment: after they have decoded a slash or a
// backslash, or have taken parameters away (Tomcat).
func disputed(segment string) bool {
	name, _, parameters := strings.Cut(segment, ";")
	if parameters && (name == "." || name == "..") {
		return true
	}
	if !strings.Contains(segment, "%2F") && !strings.Contains(segment, "%5C") {
		return false
	}
	for part := range strings.SplitSeq(slashes.Replace(segment), "/") {
		if name, _, _ := strings.Cut(part, ";"); name == "." || name == ".." {
			return true
		}
	}
	return false
}

var slashes = strings.NewReplacer("%2F", "/", "%5C", "/")

// Alternative returns a canonical path as a server sees it that decodes slashes, "" if that is the same.
func Alternative(path string) string {
	if !strings.Contains(path, "%2F") && !strings.Contains(path, "%5C") {
		return ""
	}
	other, ok := Path(slashes.Replace(path))
	if !ok {
		return ""
	}
	return other
}
