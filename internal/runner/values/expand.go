package values

import "strings"

// Expand replaces $(NAME) by the value of NAME, as Kubernetes does in command,
// args and env: $$ stands for one dollar sign, and a reference to an
// unknown name stays as it is.
func Expand(s string, value func(string) (string, bool)) string {
	if !strings.Contains(s, "$") {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '$' || i+1 == len(s) {
			b.WriteByte(s[i])
			continue
		}
		switch s[i+1] {
		case '$':
			b.WriteByte('$')
			i++
		case '(':
			end := strings.IndexByte(s[i:], ')')
			if end < 0 {
				b.WriteString("$(")
				i++
				continue
			}
			if v, ok := value(s[i+2 : i+end]); ok {
				b.WriteString(v)
			} else {
				b.WriteString(s[i : i+end+1])
			}
			i += end
		default:
			b.WriteByte('$')
		}
	}
	return b.String()
}
