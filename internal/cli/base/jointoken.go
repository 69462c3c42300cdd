package base

import (
	"fmt"
	"os"
	"strings"
)

// TokenEnv is the variable of an agent's join token.
const TokenEnv = "FAIRLEAD_TOKEN"

// JoinFlags name a join token.
type JoinFlags struct{ Text, File string }

// Read returns the token, "" if none is given.
func (f JoinFlags) Read() (string, error) {
	text, file := f.Text, f.File
	switch {
	case text != "" && file != "":
		return "", Usagef("--token-file takes the place of --token: give one")
	case strings.Contains(text, "/"): // no token has one
		file = text
	case text == "" && file == "":
		text = os.Getenv(TokenEnv)
	}
	if file != "" {
		data, err := os.ReadFile(file)
		if err != nil {
			return "", fmt.Errorf("the join token: %w", err)
		}
		text = string(data)
	}
	return strings.TrimSpace(text), nil
}
