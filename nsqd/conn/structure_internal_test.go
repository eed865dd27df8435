package conn

import (
	"reflect"
	"testing"
)

// What serves a connection knows what it needs, and not the server that it is in.
func TestNothingPointsBackToTheServer(t *testing.T) {
	seen := map[reflect.Type]bool{}
	var walk func(reflect.Type, string)
	walk = func(is reflect.Type, by string) {
		switch is.Kind() {
		case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Map:
			walk(is.Elem(), by)
		case reflect.Struct:
			if is == reflect.TypeFor[Server]() {
				t.Errorf("%s is a way back to the server", by)
			}
			if seen[is] || is.PkgPath() != reflect.TypeFor[Server]().PkgPath() {
				return
			}
			seen[is] = true
			for i := range is.NumField() {
				walk(is.Field(i).Type, by+"."+is.Field(i).Name)
			}
		}
	}
	walk(reflect.TypeFor[client](), "client")
	walk(reflect.TypeFor[goroutine](), "goroutine")
	walk(reflect.TypeFor[unpackReader](), "unpackReader")
	walk(reflect.TypeFor[writer](), "writer")
	walk(reflect.TypeFor[loop](), "loop")
}
